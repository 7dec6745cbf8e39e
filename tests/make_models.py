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
from tests.models.test_latent import FILES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
FILE_TESTS = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "tests/models/test_gguf_import.py"),
              "gpt_oss": "tests/models/test_gpt_oss.py", "smallthinker": "tests/models/test_smallthinker.py"}
"""Tests of the files of architectures that have no case of their own."""
INTRODUCTION = """# Models

This page is made from the program: `python -m tests.make_models`.

Each architecture is compared with transformers on tiny random models of odd sizes: grouped queries, windows shorter
than the prompt, tied heads, biases, each kind of rotation that it has. `tests/golden` holds transformers' logits, so
that the comparison runs without torch; `python -m pytest -m reference tests/models/test_architectures.py` asks
transformers itself (extra `reference`). With weights as they are and KV in float32, max abs(difference) / max
abs(logit) is below 1e-5, in prompts by chunks and in decoding one by one; that each ingredient shows in these logits
is a test of its own. A GGUF file of the same model, with the names of the gguf package and what llama.cpp's converter
does to its values, gives the same logits.

What config.json or metadata say and is not understood is refused by name, and so is an unknown architecture, with the
nearest names.

## What runs

| model_type | what it is | GGUF | compared with transformers on | GGUF files compared |
|---|---|---|---|---|
"""
COMMANDS = """
The comparisons are `python -m pytest tests/models/test_models_golden.py -k NAME` and
`python -m pytest tests/models/test_gguf_families.py -k NAME`, of MoE models `tests/models/test_experts.py`, of latent
attention `tests/models/test_latent.py`. Architectures that transformers does not have (bamboo, sparsellama) are
compared with a forward pass in NumPy (`tests/helpers/reference.py`, which has transformers' logits for all others):
`python -m pytest tests/models/test_families.py -k relufied`; smallthinker with one of its own, which follows its
authors' model: `python -m pytest tests/models/test_smallthinker.py`. Llama also with six trained models, token by
token: `python -m pytest tests/models/test_models_golden.py -k golden_tokens`.

## Text of models that see or hear

The part that sees pictures, or hears, is left out when a bundle is made, which is said; what remains is the text
model, its tensors by either of the two names that transformers gave them.

| model_type | runs as | compared on |
|---|---|---|
"""
FOLDS = """
## What is folded

What is exact algebra is done when a bundle is made; `model_type` and the fields of the bundle's config say what was
done, so that a tensor's original can be found again.

| family | what | where it went |
|---|---|---|
| Gemma 1 to 3 | norms stored as what they differ from 1 | 1 + w is stored (GGUF files have it already) |
| Gemma 1 to 3 | embeddings times sqrt(hidden_size) | nowhere: a step behind the lookup (`embedding_scale`), because the table may be the head |
| Gemma 2, 3, Granite, GPT-Neo | what scores are multiplied by | a number of the attention (`attention_scale`) |
| Granite | residual_multiplier r | the stream is 1 / r times as large: `embedding_scale` is embedding_multiplier / r, `rms_norm_eps` is divided by r^2. No matrix is touched, so codes of a GGUF file are kept |
| Granite, Command-R | logits_scaling, logit_scale | the last norm's weights (`logits_scale`) |
| Command-R, GLM-4 | rotation of neighbours | rows of q and k are reordered, as a Llama's in GGUF |
| Gemma 4 | the row of a token times sqrt(width), what is added to it times 1 / sqrt(hidden_size), the sum times 1 / sqrt(2) | the row is as it is stored: the norm of what is added is divided by sqrt(width), and two norms have another eps |
| GPT-2 | (in_features, out_features) | matrices are transposed |
| DeepSeek-V2, V3, GLM-4.7 | keys and values of all heads from one latent | `kv_b_proj` by head: the keys' rows transposed (`k_b`), the values' rows (`v_b`); never multiplied with other matrices |
| DeepSeek-V2, V3, GLM-4.7 | rotation of neighbours | the rotated rows of queries and keys are reordered |
| StableLM 2 12B, Command-R+ | layer norms of heads, each with its own weight | one norm of all heads without weights, then one multiplication of columns |
| Ministral 3 | queries times a factor of their position | a second rotation of queries alone, whose cosines are the factors and whose sines are 0 |
| Qwen3-VL-MoE | experts' stacks as (experts, inputs, outputs) | matrices are transposed, where the shapes of a layer's stacks say so |
| Granite MoE with a shared FFN, GPT-BigCode, GPT-2, GPT-NeoX, Falcon, Phi-3, GLM-4 | q, k and v, gate and up in one tensor | read as rows of it |
"""
LIMITS = """
## What is left out

* Gemma 3n: refused by name.
* ALiBi in Falcon: transformers rounds slopes, positions and their product to bfloat16 in every precision, and so do
  the kernels, so that logits agree (beyond position 256 neighbours share a rounded position). transformers' eager
  attention adds these biases twice (5.23, measured); what is matched is its default, sdpa. BLOOM and MPT have exact
  products. MPT with `alibi: false`, another `alibi_bias_max` in its config.json (which transformers ignores) or
  `clip_qkv` is refused.
* Llama with `partial_rotary_factor` in its config.json turns whole heads, as in transformers (5.23), which reads the
  field only where the rotation is stretched and then fails; edgeinfer refuses that by name. A GGUF file's
  `rope.dimension_count` counts.
* Dynamic scaling of RoPE has other frequencies for every context beyond that of the training. The context of the run
  chooses: up to `max_position_embeddings`, where `--ctx` begins, the plain rotation holds, and a longer `--ctx` (at
  most `factor` times as long) has its own for the whole text. transformers chooses again for every length; for a text
  as long as the context the two agree.
* LongRoPE (Phi-3 and 4-mini with 128k) has two sets of frequencies. The context of the run chooses: `--ctx` no longer
  than that of the training takes the short ones, a longer one the long ones for the whole text. transformers chooses
  again for every length.
* Granite's class default for `attention_multiplier`, 1 instead of 1 / sqrt(head_dim), makes scores so large that
  softmax magnifies every rounding. Random Granite of 4 layers (heads of 64, weights of deviation 0.1), farthest logit
  from transformers in float64 beside the largest: f32 weights and KV 6.2e-5, transformers in float32 1.1e-4; with KV
  f16 2.6e-2. At a multiplier of 1/8: 5.0e-6, 6.2e-6, 1.8e-3. Published Granite files name a smaller multiplier;
  `--kv f32` helps those that do not.
* Layers with a window keep K and V of what it sees ([long context](../explanation/long-context.md)); two windows that
  differ share the blocks of the larger.
* Prompts of models whose layers share K and V, or that have a row of each token for every layer (Gemma 4), and of
  OPT-350m are not pruned (`--lazy`).
* Experts of MoE models are stored in tiles only: `--ffn-layout neuron` is about FFNs that every token goes through,
  with a gate or without (OPT), normed on their way out or not (Gemma 2, 3, 4, OLMo 2). `sparsify` wants layers of one
  size, which Gemma 4's E2B has not.
* ONNX export and `--device cuda`: the four architectures of Llama's block, and others where they need nothing but
  other names; what has no form there is refused by name.
* Latent attention (DeepSeek-V2, V3, GLM-4.7-Flash): `--attention` (no rows of V are stored), ONNX.
* Pickles (`.bin`), as OPT and early Falcon repositories have them, are not read.
"""


def described(name: str) -> str:
    """The first sentence of an architecture's file."""
    text = importlib.import_module(f"{architectures.__name__}.{name}").__doc__ or ""
    return text.split("\n")[0].rstrip(".").replace("|", "/")


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
        of_files = [case for case in plain if case in ARCHITECTURES or case in (*IN_FILES, *FILES)]
        compared = ", ".join(plain) or "the oracle in NumPy"
        own = FILE_TESTS.get(name) or ", ".join(of_files) or "-"
        page += f"| `{name}` | {described(name)} | {files} | {compared} | {own} |\n"
    page += COMMANDS
    for name, inside in seeing_models().items():
        on = ", ".join(case for case, kind in wrapped.items() if kind == name)
        page += f"| `{name}` | `{inside}` | {on or 'its config alone'} |\n"
    return page + FOLDS + LIMITS


if __name__ == "__main__":
    PAGE.write_text(models(), encoding="utf-8")
