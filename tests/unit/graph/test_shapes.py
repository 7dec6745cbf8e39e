"""Built-in shapes: published parameter counts, shapes that run, and configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import builtin_shapes, read_config
from edgeinfer.models.describe import describe, describe_config
from edgeinfer.models.uses import called

BILLIONS = {  # of the model cards and reports, said independently of the table
    "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 406, "llama-3.2-1b": 1.235, "llama-3.2-3b": 3.21, "tinyllama-1.1b": 1.1, "smollm2-135m": 0.1345,
    "smollm2-360m": 0.362, "smollm2-1.7b": 1.71, "mistral-7b": 7.24, "mistral-7b-v0.3": 7.25, "mistral-nemo-12b": 12.2,
    "mistral-small-24b": 23.6, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235,
    "gemma-2-2b": 2.614, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77, "gemma-4-31b": 30.7, "gemma-4-26b-a4b": 25.2, "gemma-4-12b": 11.95,
    "phi-3-mini": 3.82, "phi-3-medium": 14.0, "phi-4": 14.7,
    "deepseek-r1-distill-qwen-1.5b": 1.78, "olmoe-1b-7b": 6.92, "deepseek-v2-lite": 15.7,
    "glm-4.7-flash": 29.94, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "lfm2-1.2b": 1.17, "lfm2-8b-a1b": 8.34,
    "granite-4-h-tiny": 6.94, "nemotron-3-nano-30b-a3b": 31.58, "falcon-h1-0.5b": 0.521,
    "glm-4.5-air": 106.85, "deepseek-v3": 671.03,
    "phi-4-mini": 3.836, "ministral-8b": 8.0198, "ministral-3-3b": 3.43, "ministral-3-8b": 8.49, "ministral-3-14b":
    13.5, "mistral-small-22b": 22.247, "mistral-large-123b": 122.61, "qwen3-coder-480b-a35b": 480.15,
    "gemma-3-270m": 0.2681, "smollm3-3b": 3.075, "olmo-3-7b": 7.298, "olmo-3-32b": 32.2, "glm-4-9b": 9.4,
    "glm-4-32b": 32.57, "glm-4.5": 352.8, "kimi-k2": 1026, "deepseek-v2": 235.74, "lfm2-350m": 0.35448, "lfm2-700m":
    0.74249, "lfm2-2.6b": 2.569, "granite-4-micro": 3.4, "granite-4-h-micro": 3.19, "granite-4-h-small": 32.2,
    "granite-3.3-2b": 2.53, "granite-3.3-8b": 8.17, "nemotron-nano-9b-v2": 8.888, "nemotron-nano-4b": 4.51,
    "exaone-4-1.2b": 1.279, "exaone-4-32b": 32, "ernie-4.5-0.3b": 0.3607, "command-r7b": 8.028, "command-a-111b":
    111.06, "aya-expanse-8b": 8.028, "command-r-32b": 32.296, "command-r-plus-104b": 103.81, "llama-3-70b": 70.554,
    "llama-1-30b": 32.53, "llama-1-65b": 65.29, "codellama-7b": 6.7385, "codellama-13b": 13.016, "codellama-34b":
    33.744, "codellama-70b": 68.98, "open-llama-3b": 3.4265, "qwen1.5-0.5b": 0.46399, "qwen1.5-1.8b": 1.8368,
    "qwen1.5-4b": 3.9504, "qwen1.5-7b": 7.7213, "qwen1.5-14b": 14.167, "qwen1.5-32b": 32.512, "yi-6b": 6.061,
    "yi-9b": 8.829, "yi-34b": 34.389, "yi-coder-1.5b": 1.4765, "gemma-2b": 2.5062, "gemma-7b": 8.5377, "phi-2":
    2.7797, "phi-1.5": 1.4183, "phi-3.5-mini": 3.8211, "deepseek-coder-1.3b": 1.3465, "deepseek-coder-6.7b": 6.7405,
    "deepseek-coder-33b": 33.343, "deepseek-llm-7b": 6.9104, "deepseek-llm-67b": 67.425, "solar-10.7b": 10.732,
    "gpt2": 0.12444, "gpt2-medium": 0.35482, "gpt2-large": 0.77403, "gpt2-xl": 1.5576, "gpt-neox-20b": 20.555,
    "pythia-70m": 0.070427, "pythia-160m": 0.16232, "pythia-410m": 0.40533, "pythia-1b": 1.0118, "pythia-1.4b":
    1.4146, "pythia-2.8b": 2.7752, "pythia-6.9b": 6.8573, "pythia-12b": 11.846, "falcon-7b": 6.9217, "falcon-40b":
    41.303, "falcon3-1b": 1.6694, "falcon3-3b": 3.2277, "falcon3-7b": 7.4556, "falcon3-10b": 10.306, "olmo-2-1b":
    1.4849, "olmo-2-7b": 7.2986, "olmo-2-13b": 13.716, "olmo-2-32b": 32.234, "starcoder2-3b": 3.0304,
    "starcoder2-7b": 7.1739, "starcoder2-15b": 15.958, "stablelm-2-1.6b": 1.6445, "stablelm-3b": 2.7954,
    "command-r-35b": 34.981, "mpt-7b": 6.6493, "bloom-560m": 0.55922, "bloom-1b1": 1.0653, "bloom-1b7": 1.7224,
    "bloom-3b": 3.0026, "bloom-7b1": 7.069, "opt-125m": 0.12524, "opt-1.3b": 1.3158, "opt-2.7b": 2.6516, "opt-6.7b":
    6.6585, "opt-13b": 12.853, "danube3-500m": 0.5136, "danube3-4b": 3.96,
    "qwen1.5-72b": 72.288, "qwen1.5-110b": 111.2, "granite-3b-code": 3.483, "granite-8b-code": 8.055,
    "starcoder-15b": 15.518, "stablelm-2-12b": 12.143, "gpt-neo-125m": 0.1252, "gpt-neo-1.3b": 1.3156,
    "gpt-neo-2.7b": 2.6513, "mpt-30b": 29.958, "redpajama-3b": 2.776,
    "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 396.5, "kimi-linear-48b-a3b": 49.1, "falcon-h1-1.5b": 1.555,
    "falcon-h1-1.5b-deep": 1.555, "falcon-h1-3b": 3.149, "falcon-h1-7b": 7.59, "falcon-h1-34b": 33.6,
    "granite-4-h-1b": 1.4615, "granite-4-h-350m": 0.34, "granite-4-1b": 1.6318, "granite-4-350m": 0.352,
    "lfm2-24b-a2b": 23.84, "glm-5": 744, "moonlight-16b-a3b": 15.96, "mistral-large-3-675b": 673, "minimax-m2":
    228.7, "seed-oss-36b": 36.15, "hunyuan-a13b": 80.4, "ernie-4.5-21b-a3b": 21.83, "ernie-4.5-300b-a47b":
    299.5, "dots.llm1": 142.77, "ling-mini-2.0": 16.26, "ling-flash-2.0": 102.9, "llama-4-scout": 107.8,
    "llama-4-maverick": 400.7, "phi-3.5-moe": 41.87, "dbrx-132b": 131.6, "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.41, "granite-34b-code": 33.7156, "minitron-8b": 8.41, "internlm2-1.8b": 1.89,
    "internlm2-7b": 7.74, "internlm2-20b": 19.86, "baichuan2-7b": 7.506, "baichuan2-13b": 13.9,
    "exaone-3.5-2.4b": 2.405, "exaone-3.5-7.8b": 7.818, "exaone-3.5-32b": 32.0, "minicpm4-8b": 8.19,
    "bitnet-2b": 2.41, "hunyuan-7b": 7.5, "mimo-7b": 7.62, "codestral-mamba-7b": 7.285, "nemotron-nano-12b-v2":
    12.31, "nemotron-mini-4b": 4.19, "apertus-8b": 8.05, "apertus-70b": 70.6, "goliath-120b": 117.75,
    "miqu-103b": 103.2, "nemotron-3-super-120b-a12b": 120.6,
    "falcon-180b": 178.6, "granite-3.1-1b-a400m": 1.33, "granite-3.1-3b-a800m": 3.3, "granite-20b-code": 20.07,
    "internlm3-8b": 8.8, "ling-lite-1.5": 16.8,
    "llama-1-7b": 6.738, "llama-1-13b": 13.016, "olmo-1b": 1.1768, "olmo-7b": 6.8881, "gpt-j-6b": 6.0534,
    "minicpm-1b": 1.36, "minicpm-2b": 2.7249, "minicpm3-4b": 4.0742, "minicpm4-0.5b": 0.434, "devstral-2-123b": 125.03,
    "hunyuan-0.5b": 0.539, "hunyuan-1.8b": 1.791, "chatglm3-6b": 6.2436, "distilgpt2": 0.08191, "phi-3-small": 7.39,
}
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.1, "qwen3-30b-a3b": 3.35, "qwen3-235b-a22b": 22.2,
          "olmoe-1b-7b": 1.28, "deepseek-v2-lite": 2.66, "glm-4.7-flash": 3.9, "gemma-4-26b-a4b": 3.8,
          "gpt-oss-20b": 3.61 + 0.58, "gpt-oss-120b": 5.13 + 0.58,
          "smallthinker-4b-a0.6b": 0.63 + 0.233, "smallthinker-21b-a3b": 3.72, "qwen3-next-80b-a3b": 3.87,
          "qwen3.5-35b-a3b": 3.45, "lfm2-8b-a1b": 1.56, "granite-4-h-tiny": 1.47, "nemotron-3-nano-30b-a3b": 3.58,
          "glm-4.5-air": 12.2 + 1.24, "deepseek-v3": 36.6 + 0.93, "qwen3-coder-480b-a35b": 35.4, "glm-4.5": 32.1 + 1.55,
          "kimi-k2": 32.86, "deepseek-v2": 21.4, "granite-4-h-small": 8.8,
          "qwen3.5-122b-a10b": 9.77, "qwen3.5-397b-a17b": 17.35, "kimi-linear-48b-a3b": 3.48, "lfm2-24b-a2b": 2.33,
          "glm-5": 41.05, "moonlight-16b-a3b": 2.91, "mistral-large-3-675b": 39.95, "minimax-m2": 11.03,
          "hunyuan-a13b": 12.75, "ernie-4.5-21b-a3b": 3.35, "ernie-4.5-300b-a47b": 47.93, "dots.llm1": 14.02,
          "ling-mini-2.0": 1.43, "ling-flash-2.0": 6.15, "llama-4-scout": 17.17, "llama-4-maverick": 17.18,
          "phi-3.5-moe": 6.64, "dbrx-132b": 36.47, "qwen1.5-moe-a2.7b": 2.69, "qwen2-57b-a14b": 14.25,
          "nemotron-3-super-120b-a12b": 12.77,
          "granite-3.1-1b-a400m": 0.429, "granite-3.1-3b-a800m": 0.883, "ling-lite-1.5": 2.75, "lfm2.5-8b-a1b": 1.686,
          "grok-1": 83.76}
"""The cards of gpt-oss, SmallThinker, GLM-4.5-Air and DeepSeek-V3 leave the embedding out (that of GLM the head too);
those of the five before these round to 3, 3, 1.5, 1 and 3.5.
"""


def test_documents_count_the_shapes() -> None:
    n = len(builtin_shapes())
    for document, words in (("docs/explanation/planning.md", "published models"),
                            ("CHANGELOG.md", "built-in shapes")):
        assert f" {n} {words}" in (Path(__file__).parents[3] / document).read_text(encoding="utf-8"), document


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("name", builtin_shapes())
def test_each_shape_has_its_published_parameters(name: str) -> None:
    shape, description = builtin_shapes()[name], describe(name)
    assert description.parameters == pytest.approx(shape.parameters, rel=1e-6)
    if name in BILLIONS:
        assert description.parameters == pytest.approx(BILLIONS[name] * 1e9, rel=0.005)
    assert description.active_parameters == pytest.approx(
        ACTIVE[name] * 1e9 if name in ACTIVE else description.parameters, rel=0.01)
    assert description.source == shape.origin and shape.origin.startswith(f"built-in shape, as {shape.source}")
    assert not shape.family or called(name, "chat") is called(name, "code") is None  # what is not run: not recommended


def test_there_are_enough_of_them_and_each_family_is_there() -> None:
    names = builtin_shapes()
    assert len(names) >= 40
    for family in ("llama-2", "llama-3.1", "llama-3.2", "mistral", "mixtral", "qwen2.5", "qwen3", "gemma-2", "gemma-3",
                   "phi-3", "phi-4", "smollm2", "tinyllama", "deepseek-r1"):
        assert any(name.startswith(family) for name in names), family


def test_of_a_moe_only_the_active_experts_are_read() -> None:
    mixtral, dense = describe("mixtral-8x7b"), describe("mistral-7b")
    ffn = dense.ffn_bytes  # the same layer sizes but for the router
    assert mixtral.ffn_bytes == pytest.approx(2 * ffn)
    assert mixtral.all_bytes_per_pass - mixtral.bytes_per_token == pytest.approx(6 * ffn)
    routers = 32 * 16 * 4096 * 4  # 32 layers, 8 experts padded to a tile of 16 rows, float32
    assert mixtral.bytes_per_token - dense.bytes_per_token == ffn + routers
    assert dense.all_bytes_per_pass == dense.bytes_per_token


def test_windows_of_the_families() -> None:
    assert [describe("gemma-2-2b").config.window(i) for i in range(4)] == [4096, 0, 4096, 0]
    assert [describe("gemma-3-1b").config.window(i) for i in range(7)] == [512] * 5 + [0, 512]
    assert set(describe("phi-3-mini").config.windows) == {2047}
    assert describe("phi-4").config.windows == ()


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**builtin_shapes()[name].config, **changes}


def test_text_config_of_models_that_see() -> None:
    flat = config("gemma-3-4b")
    nested = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": flat}
    assert read_config(flat) == read_config(nested)
    with pytest.raises(CheckpointError, match=r"text_config holds 7; it must be a JSON object"):
        read_config({"model_type": "gemma3", "text_config": 7})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be a whole number from 1 to 8"),
        ("mixtral-8x7b", {"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number from 1 to 4096"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": "x"}, "moe_intermediate_size is 'x'; it must be a whole number"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, r"mlp_only_layers is \[48\]; it must list layers"),
        ("gemma-2-2b", {"sliding_window": -1}, "sliding_window is -1; it must be a whole number"),
        ("phi-4", {"hidden_size": None}, "config.json lacks 'hidden_size'"),
        ("phi-4", {"hidden_act": "swiglu"}, "hidden_act is 'swiglu', which edgeinfer does not support"),
        ("llama-2-7b", {"model_type": "mamba"}, "model_type is 'mamba', which edgeinfer does not support"),
        ("llama-2-7b", {"model_type": None}, "config.json lacks 'model_type'"),
        ("llama-2-7b", {"model_type": ["llama"]}, r"model_type is \['llama'\], which edgeinfer does not support"),
    ],
)
def test_wrong_fields_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        describe_config(config(name, **changes), name, "test")
