"""The table of what runs: ``python -m tests.make_models`` writes docs/reference/models.md from the sources and the
golden cases.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from edgeinfer.graph import architectures, family_of, read_config, seeing_models, supported_architectures
from tests.helpers import golden_cases
from tests.models.test_experts import IN_FILES
from tests.models.test_gguf_families import ARCHITECTURES
from tests.models.test_gguf_hybrids import NAMES as HYBRIDS
from tests.models.test_latent import FILES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
FILE_TESTS = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "tests/models/test_gguf_import.py"),
              "gpt_oss": "tests/models/test_gpt_oss.py", "smallthinker": "tests/models/test_smallthinker.py"}
"""Tests of the files of architectures that have no case of their own."""
INTRODUCTION = """# Models

This page is made from the program: `python -m tests.make_models`.

Each architecture is compared with transformers on tiny random models of odd sizes: grouped queries, windows shorter
than the prompt, tied heads, biases, each kind of rotary embedding that it supports. `tests/golden` holds transformers'
logits, so the comparison runs without torch; `python -m pytest -m reference tests/models/test_architectures.py` runs
transformers itself (extra `reference`). With unquantised weights and KV in float32, max abs(difference) / max
abs(logit) is below 1e-5, for prompts in chunks and for single decoded tokens. Separate tests verify that each component
affects these logits. A GGUF file of the same model, with the names of the gguf package and the changes that llama.cpp's
converter makes to values, gives the same logits.

Unknown settings in config.json or metadata are refused with their name, unknown architectures with the nearest known
names.

## Supported architectures

| model_type | model | GGUF | compared with transformers on | GGUF files compared |
|---|---|---|---|---|
"""
COMMANDS = """
The comparisons are `python -m pytest tests/models/test_models_golden.py -k NAME` and
`python -m pytest tests/models/test_gguf_families.py -k NAME`, for MoE models `tests/models/test_experts.py`, for latent
attention `tests/models/test_latent.py`, for recurrent layers `tests/models/test_gguf_hybrids.py`, which compares all
weights bit for bit. Architectures that transformers lacks (bamboo, sparsellama) are compared with a
forward pass in NumPy (`tests/helpers/reference.py`, which has transformers' logits for all others):
`python -m pytest tests/models/test_families.py -k relufied`; smallthinker with a separate one, which follows its
authors' model: `python -m pytest tests/models/test_smallthinker.py`. Llama is also compared with six trained models,
token by token: `python -m pytest tests/models/test_models_golden.py -k golden_tokens`.

## Text part of multimodal models

Vision and audio parts are left out of a bundle, with a message. The text model remains; its tensors may have either of
the two names that transformers uses.

| model_type | runs as | compared on |
|---|---|---|
"""
PULLS = Path(__file__).parent / "data" / "ollama_pulls.tsv"
SHARES = """
## Share of what people pull

Of ollama's library the {} text models with local weights that were pulled most between April and July 2026 ({:.0f}
million pulls), edgeinfer runs {:.0f} % of the pulls. Pulls include those of programs; the library has vision models and
a long tail beside these.

| architecture | models | share of the pulls |
|---|---|---|
"""
FOLDS = """
## Folding

Exact algebraic transformations are applied when a bundle is created. `model_type` and the fields of the bundle's config
determine them, so the original of a tensor can be recovered.

| family | original | in the bundle |
|---|---|---|
| Gemma 1 to 3 | norms stored as the difference from 1 | 1 + w is stored (GGUF files already have it) |
| Gemma 1 to 3 | embeddings times sqrt(hidden_size) | not folded: a step after the lookup (`embedding_scale`), because the table may be the head |
| Gemma 2, 3, Granite, GPT-Neo | factor of the scores | a parameter of the attention (`attention_scale`) |
| Granite | residual_multiplier r | the residual stream is 1 / r times as large: `embedding_scale` is embedding_multiplier / r, `rms_norm_eps` is divided by r^2. Matrices are unchanged, so codes of a GGUF file are kept |
| Granite, Command-R | logits_scaling, logit_scale | the last norm's weights (`logits_scale`) |
| Command-R, GLM-4 | rotary embedding of neighbouring elements | rows of q and k are reordered, like those of a Llama in GGUF |
| Gemma 4 | the row of a token times sqrt(width), its addend times 1 / sqrt(hidden_size), the sum times 1 / sqrt(2) | the row is stored unchanged: the norm of the addend is divided by sqrt(width), and two norms have another eps |
| GPT-2 | (in_features, out_features) | matrices are transposed |
| DeepSeek-V2, V3, GLM-4.7, Kimi Linear | keys and values of all heads from one latent | `kv_b_proj` per head: the keys' rows transposed (`k_b`), the values' rows (`v_b`); not multiplied with other matrices |
| DeepSeek-V2, V3, GLM-4.7 | rotary embedding of neighbouring elements | the rotated rows of queries and keys are reordered |
| StableLM 2 12B, Command-R+ | layer norms of heads, each with its own weight | one norm of all heads without weights, then one multiplication of columns |
| Ministral 3 | queries times a factor that depends on their position | a second rotary embedding of the queries, whose cosines are the factors and whose sines are 0 |
| Qwen3-VL-MoE | experts' stacks as (experts, inputs, outputs) | matrices are transposed if the shapes of a layer's stacks show this order |
| Qwen3.5, Qwen3-Next, OLMo Hybrid, Kimi Linear, Granite 4, Falcon-H1, Nemotron-H, Bamba | A_log of recurrent layers, a depthwise convolution's weight (channels, 1, width) | -exp(A_log) is stored (GGUF files already have it), and the convolution's columns one after the other |
| Qwen3.5 | norms stored as the difference from 1; query and gate of each head in one matrix | 1 + w is stored; the rows are taken apart |
| Qwen3.5 in GGUF | value heads in another order, where several share a key | rows are put back; the columns of the output matrix stay where they are and an order of its inputs is stored |
| Falcon-H1 | multipliers of single matrices, of the embedding and of the logits | the matrices' weights, `embedding_scale`, the last norm's weights |
| Nemotron 3 | experts without a gate, relu2(u) | their first matrix is stored twice, as gate and up: relu(u) u |
| Granite MoE with a shared FFN, GPT-BigCode, GPT-2, GPT-NeoX, Falcon, Phi-3, GLM-4 | q, k and v, gate and up in one tensor | read as rows of it |
"""
LIMITS = """
## Limitations

* Gemma 3n is refused with a message.
* ALiBi in Falcon: transformers rounds slopes, positions and their product to bfloat16 in every precision. The kernels
  do the same, so logits agree (beyond position 256 neighbours share a rounded position). transformers' eager attention
  adds these biases twice (5.23, measured); edgeinfer matches its default, sdpa. BLOOM and MPT use exact products. MPT
  with `alibi: false`, another `alibi_bias_max` in its config.json (which transformers ignores) or `clip_qkv` is
  refused.
* Llama with `partial_rotary_factor` in its config.json rotates whole heads, as in transformers (5.23), which reads the
  field only with scaled RoPE and then fails; edgeinfer refuses that combination. In a GGUF file
  `rope.dimension_count` applies.
* Dynamic RoPE scaling has different frequencies for every context beyond the training context. edgeinfer uses the
  run's context: plain frequencies up to `max_position_embeddings`, the default of `--ctx`, and for a longer `--ctx` (at
  most `factor` times as long) its frequencies for the whole text. transformers selects them again for every length; the
  two agree for a text as long as the context.
* LongRoPE (Phi-3 and 4-mini with 128k) has two sets of frequencies. edgeinfer uses the short ones if `--ctx` is at most
  the training context, and the long ones for the whole text otherwise. transformers selects them again for every
  length.
* Granite's class default for `attention_multiplier`, 1 instead of 1 / sqrt(head_dim), makes scores so large that
  softmax magnifies every rounding error. In a random Granite of 4 layers (heads of 64, weights with a standard
  deviation of 0.1) the largest deviation from transformers in float64, relative to the largest logit, is 6.2e-5 with
  f32 weights and KV, 1.1e-4 for transformers in float32, and 2.6e-2 with KV f16. With a multiplier of 1/8 these are
  5.0e-6, 6.2e-6 and 1.8e-3. Published Granite files specify a smaller multiplier; use `--kv f32` for others.
* Layers with a window keep only the K and V inside it ([long context](../explanation/long-context.md)); two different
  windows share the blocks of the larger one.
* `--lazy` does not prune prompts of OPT-350m and of models whose layers share K and V or have a row per token for every
  layer (Gemma 4).
* Experts of MoE models are stored in tiles only: `--ffn-layout neuron` applies to FFNs that process every token, with a
  gate or without (OPT), with a normed output or without (Gemma 2, 3, 4, OLMo 2). `sparsify` requires layers of one
  size, which Gemma 4's E2B does not have.
* ONNX export and `--device cuda` have [all architectures](onnx-models.md), models with recurrent layers in slots only.
* The first layer that predicts further tokens drafts in Qwen3.5 and 3.6, Qwen3-Next, GLM-4.5 to 4.7 and DeepSeek-V3
  (`--speculate mtp`), with the model's own embedding and output head. Those of Nemotron 3 are left out, with a message.
* Nemotron-H's time steps are bounded by `time_step_limit`, as in the published code and in llama.cpp. transformers
  (5.23) bounds those of a prompt by `time_step_min`, and those of single tokens not at all. GGUF files have no bounds
  of time steps.
* Experts of Nemotron 3 take half as much memory again as their weights, because their first matrix is stored twice.
* Latent attention (DeepSeek-V2, V3, GLM-4.7-Flash) does not support `--attention`: no rows of V are stored.
* Pickles (`.bin`), as in OPT and early Falcon repositories, are not read.
"""


def described(name: str) -> str:
    """The first sentence of an architecture's file."""
    text = importlib.import_module(f"{architectures.__name__}.{name}").__doc__ or ""
    return text.split("\n")[0].rstrip(".").replace("|", "/")


def shares() -> str:
    """The most pulled models of ollama's library that are text models with local weights, family by family."""
    lines = PULLS.read_text(encoding="utf-8").splitlines()[1:]
    runs, rows, missing = set(supported_architectures()), dict[str, list[tuple[str, float]]](), 0.0
    for line in lines:
        model, pulls, names = line.split("\t")
        if runs.issuperset(names.split()):
            rows.setdefault(names.split()[0], []).append((model, float(pulls)))
        else:
            missing += float(pulls)
    sums = {name: sum(pulls for _, pulls in found) for name, found in rows.items()}
    total = sum(sums.values()) + missing
    page = SHARES.format(len(lines), total, 100 * sum(sums.values()) / total)
    for name in sorted(rows, key=lambda name: -sums[name]):
        page += f"| `{name}` | {', '.join(model for model, _ in rows[name])} | {100 * sums[name] / total:.1f} % |\n"
    return page


def models() -> str:
    """The page."""
    cases: dict[str, list[str]] = {}
    for case in golden_cases.cases():
        cases.setdefault(read_config(case.config).model_type, []).append(case.name)
    wrapped = {name: golden_cases.load(name).config["model_type"] for names in cases.values() for name in names
               if "vision_config" in golden_cases.load(name).config}
    page = INTRODUCTION
    for name in supported_architectures():
        files = ", ".join(gguf.name for gguf in family_of(name).gguf) or "-"
        plain = [case for case in cases.get(name, []) if case not in wrapped]
        of_files = [case for case in plain if case in ARCHITECTURES or case in (*IN_FILES, *FILES, *HYBRIDS)]
        compared = ", ".join(plain) or "the NumPy reference"
        own = FILE_TESTS.get(name) or ", ".join(of_files) or "-"
        page += f"| `{name}` | {described(name)} | {files} | {compared} | {own} |\n"
    page += COMMANDS
    for name, inside in seeing_models().items():
        on = ", ".join(case for case, kind in wrapped.items() if kind == name)
        page += f"| `{name}` | `{inside}` | {on or 'its config alone'} |\n"
    return page + shares() + FOLDS + LIMITS


if __name__ == "__main__":
    PAGE.write_text(models(), encoding="utf-8")
