"""Write tests/golden anew, from transformers (extra ``reference``): ``python -m tests.make_golden [NAME ...]``.

Each case is a decoder of odd sizes that shows some variants at once; the prompt is longer than any window and than the
original context of each RoPE scaling.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from tests.golden_cases import FOLDER, GoldenCase, save, weights

N_TOKENS = 44
LLAMA = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "bos_token_id": None}
QWEN3 = {**QWEN2, "model_type": "qwen3", "hidden_size": 52, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 18}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEP_YARN = {**YARN, "beta_fast": 8, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.6, "truncate": False}

CASES: dict[str, dict[str, Any]] = {
    "llama-mha": {**LLAMA, "rope_theta": 10000.0, "rope_scaling": None},
    "llama-gqa2-tied-relu": {**LLAMA, "num_key_value_heads": 3, "tie_word_embeddings": True, "hidden_act": "relu"},
    "llama-gqa3-bias-gelu": {
        **LLAMA, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu",
    },
    "llama-mqa-linear-relu2": {
        **LLAMA, "num_key_value_heads": 1, "hidden_act": "relu2", "intermediate_size": 150,
        "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama-llama3": {**LLAMA, "num_key_value_heads": 3, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "llama-yarn": {**LLAMA, "num_key_value_heads": 2, "rope_theta": 1000.0, "rope_scaling": YARN},
    "llama-yarn-mscale-gelu-tanh": {
        **LLAMA, "num_key_value_heads": 3, "head_dim": 14, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {**DEEP_YARN, "rope_theta": 1000.0},
    },
    "llama-wide": {  # more than one group of 64 columns, an odd number of groups of 32
        **LLAMA, "hidden_size": 84, "intermediate_size": 172, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-3, "rope_theta": 500000.0, "rope_scaling": None,
    },
    "mistral": {**MISTRAL, "hidden_act": "gelu_new", "rope_theta": 1000000.0},
    "mistral-window-head6": {**MISTRAL, "head_dim": 6, "sliding_window": 7, "num_hidden_layers": 3},
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 5},
    "qwen2-window": {
        **QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen2-yarn": {
        **QWEN2, "rope_theta": 1000.0,
        "rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 20},
    },
    "qwen3": {**QWEN3, "rope_theta": 1000000.0, "rope_scaling": None},
    "qwen3-window-bias-tied": {
        **QWEN3, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-llama3-relu": {**QWEN3, "hidden_act": "relu", "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
}  # fmt: skip


def with_transformers(name: str, config: dict[str, Any]) -> GoldenCase:
    """Logits of a config by transformers."""
    import torch

    model, tensors = transformers_model(name, config)
    ids = token_ids(name, config["vocab_size"])
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return GoldenCase(name, config, tensors, ids, logits)


def transformers_model(name: str, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """A model with its tensors: eager attention, float32, weights as `golden_cases.weights` gives them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)  # tiny matrices; more threads only wait for each other
    settings = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **_copied(settings))
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    tensors = {
        key: weights(f"{name}/{key}", list(value.shape)) for key, value in model.state_dict().items() if key not in tied
    }
    state = {key: torch.from_numpy(array.astype(np.float32)) for key, array in tensors.items()}
    report = model.load_state_dict(state, strict=False)
    if report.unexpected_keys or set(report.missing_keys) - tied:
        raise ValueError(f"{name}: {report}")
    model.tie_weights()
    return model, tensors


def token_ids(name: str, vocab_size: int) -> list[int]:
    """A random prompt that depends on the name alone."""
    bits = hashlib.shake_256(f"{name}/ids".encode()).digest(2 * N_TOKENS)
    return [int(x) % vocab_size for x in np.frombuffer(bits, "<u2")]


def _copied(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers completes the dictionaries that it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case_name in sys.argv[1:] or CASES:
        save(with_transformers(case_name, CASES[case_name]))
        print(f"{case_name}: {(FOLDER / f'{case_name}.npz').stat().st_size} bytes")
