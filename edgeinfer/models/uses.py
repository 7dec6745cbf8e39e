"""Built-in shapes by use, without those of families that edgeinfer does not run, and those that a later generation of
the same sizes replaces."""

from __future__ import annotations

from ..graph import builtin_shapes

USES = ("chat", "code", "rag")
_REPLACED = (
    "llama-1-", "llama-2-", "llama-3-", "open-llama-", "codellama-", "mistral-7b", "mistral-small-22b",
    "mistral-large-", "ministral-8b", "mixtral-", "qwen1.5-", "qwen2.5-", "gemma-2", "gemma-7b", "phi-1.5", "phi-2",
    "phi-3", "tinyllama", "deepseek-r1-distill-", "deepseek-v2", "deepseek-coder-", "deepseek-llm-", "olmoe",
    "olmo-2-", "smallthinker-", "llama-3.1-405b", "falcon", "yi-", "solar-", "gpt2", "gpt-neox-", "pythia-",
    "starcoder2-", "stablelm-", "glm-4-", "granite-3.3-", "command-r", "aya-", "mpt-", "bloom-", "opt-", "danube3-",
    "nemotron-nano-4b", "granite-3b-code", "granite-8b-code", "starcoder-", "gpt-neo-", "redpajama-",
    "granite-20b-code", "granite-34b-code", "granite-3.1-", "qwen2-57b", "minitron-", "codestral-mamba", "moonlight-",
    "goliath-", "miqu-", "bitnet-", "distilgpt2", "devstral-",
)
"""Beginnings of the names of generations that are not recommended for chats."""
_CODE = {
    "qwen2.5-0.5b": "Qwen2.5-Coder 0.5B", "qwen2.5-1.5b": "Qwen2.5-Coder 1.5B", "qwen2.5-3b": "Qwen2.5-Coder 3B",
    "qwen2.5-7b": "Qwen2.5-Coder 7B", "qwen2.5-14b": "Qwen2.5-Coder 14B", "qwen2.5-32b": "Qwen2.5-Coder 32B",
    "qwen3-30b-a3b": "Qwen3-Coder 30B-A3B", "qwen3-next-80b-a3b": "Qwen3-Coder-Next", "mistral-small-24b": "Devstral",
    "deepseek-v2-lite": "DeepSeek-Coder-V2-Lite", "gpt-oss-20b": "gpt-oss 20B", "gpt-oss-120b": "gpt-oss 120B",
    "glm-4.5-air": "GLM-4.5-Air", "glm-4.7-flash": "GLM-4.7-Flash", "deepseek-v3": "DeepSeek-V3",
    "qwen3-coder-480b-a35b": "Qwen3-Coder 480B-A35B", "devstral-2-123b": "Devstral 2 123B",
}
"""Shapes of models for code, by the name of the model."""
RAG_CTX = 16384
"""Least context that a model for documents was trained for."""


def called(name: str, use: str) -> str | None:
    """Return the name of a built-in shape for a use; None if it is not for that.

    Parameters
    ----------
    name : str
        A built-in shape.
    use : {"chat", "code", "rag"}
    """
    if use == "code":
        return _CODE.get(name)
    return None if name.startswith(_REPLACED) or builtin_shapes()[name].family else name
