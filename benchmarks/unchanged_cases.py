"""Tables of unchanged.py: which models, techniques and commands are recorded."""

from __future__ import annotations

from typing import Any

STORED = [("f16", 32, "f32", "tile16"), ("q4", 32, "int8", "tile16"), ("q4", 32, "f16", "tile16"),
          ("q4", 32, "f32", "tile16"), ("q4", 64, "int8", "tile16"), ("q4", 128, "int8", "tile16"),
          ("int8", 32, "int8", "tile16"), ("int8", 128, "int8", "tile16"), ("f32", 32, "int8", "tile16"),
          ("f32", 32, "f32", "tile16"), ("f16", 32, "int8", "tile16"), ("q4", 32, "int8", "neuron"),
          ("int8", 32, "int8", "neuron")]
"""Weights, group size, KV cache and layout of the FFNs; every family has the first two."""
TYPED_CASES = ("llama-gqa2-tied-relu", "llama-gqa3-bias-gelu", "gemma3", "phi")
"""Cases of all types: gated with ReLU and without, with windows, without a gate."""

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "logprobs": 2, "ignore_eos": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"seed": 7, "temperature": 0.9, "max_tokens": 32, "logprobs": 1, "ignore_eos": True},
    "penalised": {"seed": 3, "max_tokens": 32, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.1,
                  "frequency_penalty": 0.3, "logit_bias": {5: 2.0}, "ignore_eos": True},
    "beams": {"beams": 4, "n": 2, "max_tokens": 24},
}
BUDGETS = {"layers": 4_000_000, "experts": 6_000_000, "neurons": 600_000}
"""Bytes less than a run needs in memory: the rest comes from storage."""
PREDICT, SCREEN = "WORK/sparse", "WORK/screen"
TEXTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("demo", "demo", {}, "short"),
    ("demo, long prompt", "demo", {}, "long"),
    ("demo, several sequences", "demo", {"max_sequences": 3, "threads": 2}, "short"),
    ("demo, kv f16", "demo", {"kv": "f16"}, "long"),
    ("demo, kv f32", "demo", {"kv": "f32"}, "long"),
    ("demo, 1 thread", "demo", {"threads": 1, "prefill_chunk": 13}, "long"),
    ("demo, copied", "demo", {"mmap": False}, "short"),
    ("demo, no passes", "demo", {"recipe": "none"}, "short"),
    ("demo, beams", "demo", {"beams": 4}, "short"),
    ("demo, lookup", "demo", {"speculate": "lookup"}, "long"),
    ("demo, self", PREDICT, {"speculate": "self", "draft_tokens": 3}, "long"),
    ("demo, attention eps", "demo", {"attention": "eps:0.05"}, "long"),
    ("demo, attention top", "demo", {"attention": "top:8"}, "long"),
    ("demo, lazy", "demo", {"lazy": "keep=0.7,0.5,0.35"}, "long"),
    ("demo, sparse off", PREDICT, {"sparse": "off"}, "short"),
    ("demo, sparse exact", PREDICT, {"sparse": "exact"}, "short"),
    ("demo, sparse predict", PREDICT, {"sparse": "predict"}, "short"),
    ("demo, sparse by itself", PREDICT, {}, "short"),
    ("demo, head screened", SCREEN, {"head": "screened"}, "short"),
    ("demo, everything", PREDICT, {"sparse": "predict", "attention": "eps:0.05", "lazy": "keep=0.8,0.6,0.5"}, "long"),
    ("demo, onnx-cpu", "demo", {"device": "onnx-cpu", "kv": "f16"}, "short"),
    ("neurons in memory", PREDICT, {"sparse": "predict"}, "long"),
    ("neurons from storage", PREDICT, {"sparse": "predict", "budget": BUDGETS["neurons"]}, "long"),
    ("layers in memory", "WORK/dense", {}, "short"),
    ("layers streamed", "WORK/dense", {"budget": BUDGETS["layers"]}, "short"),
    ("experts in memory", "WORK/experts", {}, "short"),
    ("experts from storage", "WORK/experts", {"budget": BUDGETS["experts"]}, "short"),
]
"""Name, model, options of `LLM`, and which prompt."""
DATA_TEXTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("fables silu q4", "DATA/models/fables-5m-silu", {}, "short"),
    ("fables silu int8", "DATA/models/fables-5m-silu", {"weights": "int8"}, "long"),
    ("fables relu q4", "DATA/models/fables-5m-relu", {"kv": "f32"}, "long"),
    ("fables draft", "DATA/models/fables-5m-silu", {"speculate": "draft", "draft": "DATA/models/fables-draft"},
     "short"),
    ("stories", "DATA/models/stories260K-hf", {"weights": "f16"}, "short"),
    ("fables Q4_K_M", "DATA/gguf/fables-5m-silu-Q4_K_M.gguf", {}, "short"),
    ("stories MXFP4", "DATA/gguf/stories260K-hf-MXFP4_MOE.gguf", {}, "short"),
]

MADE = [
    ["sparsify", "demo", PREDICT, "--text", "INPUTS/text.txt"],
    ["sparsify", "demo", SCREEN, "--head", "--text", "INPUTS/text.txt"],
    ["convert", "INPUTS/streamed/dense", "WORK/dense"],
    ["convert", "INPUTS/streamed/experts", "WORK/experts"],
]
"""Commands that make the models of others."""
ROOM = ["--budget", "3GiB", "-t", "2"]
COMMANDS = [
    ["run", "demo", "hello", "-n", "4", "--temp", "0"],
    ["run", "demo", "Once upon", "-n", "12", "--seed", "5", "--samples", "2", "--logprobs", "2", "--speculate", "off"],
    ["run", "demo", "Once upon", "-n", "12", "--beams", "3", "--samples", "2", *ROOM],
    ["run", PREDICT, "Once upon", "-n", "12", "--temp", "0", "--speculate", "off", *ROOM],
    ["run", "demo", "x", "--budget", "1MB"],
    ["run", "demo", "x", "--temp", "-1"],
    ["run", "demo", "x", "--device", "onnx-cpu", "--sparse", "predict"],
    ["plan", "demo", *ROOM],
    ["plan", PREDICT, *ROOM, "--attention", "top:8", "--lazy", "keep=0.7,0.5,0.35"],
    ["plan", "WORK/dense", "--budget", "124MB", "--ctx", "512", "-t", "2"],
    ["plan", "WORK/experts", "--budget", "130MB", "--ctx", "512", "-t", "2"],
    ["plan", "llama-3.1-8b", "--machine", "rpi5", "--ctx", "8192"],
    ["plan", "llama-2-7b", "--machine", "rpi5", "--budget", "3GiB", "--kv", "f16"],
    ["plan", "qwen3-30b-a3b", "--machine", "rpi5", "--weights", "q4"],
    ["plan", "gemma-3-4b", *ROOM, "--ctx", "8192", "--samples", "4"],
    ["plan", "smollm2-135m", *ROOM, "--speculate", "draft", "--draft", "demo", "--ctx", "512"],
    ["plan", "INPUTS/gguf/phi-Q4_K_M.gguf", *ROOM],
    ["plan", "INPUTS/packed/gptq", *ROOM],
    ["estimate", "llama-2-7b", "--all-devices"],
    ["estimate", "llama-3.1-8b", "--machine", "rpi5", "--attention", "eps:0.01", "--ctx", "8192"],
    ["estimate", PREDICT, "--machine", "rpi5", "--sparse", "predict"],
    ["estimate", "qwen3-30b-a3b", "--machine", "rpi5", "--accepted", "2"],
    ["devices"],
    ["devices", "rpi5"],
    ["info", "demo", "--tensors"],
    ["info", PREDICT, "--program", *ROOM, "-c", "128"],
    ["info", "demo", "--program", *ROOM, "-c", "128"],
    ["info", "INPUTS/gguf/phi-Q4_K_M.gguf"],
    ["models", "--only", "INPUTS/gguf"],
    ["models", "--only", "INPUTS/packed"],
    ["verify", PREDICT],
    ["eval", "demo", "--text", "INPUTS/text.txt", "-c", "128", "--tokens", "300", *ROOM],
    ["eval", "demo", "--text", "INPUTS/text.txt", "-c", "128", "--tokens", "200", "--decode", "64", "--attention",
     "top:8", *ROOM],
    ["export", "demo", "WORK/export.onnx"],
]
