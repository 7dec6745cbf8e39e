"""OpenVINO's worker, run in the environment of openvino-genai: its pipeline with paged attention, greedy.

The pipeline keeps prefixes that it has seen. Prompts to be measured are therefore new each time, and the context before
generated tokens is always the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from serving import peak_rss_bytes, process_age_ms, serve, token_ids


class OpenVino:
    """One model in one pipeline."""

    def __init__(self) -> None:
        self._pipeline: Any = None
        self._vocab_size = self._base = self._prompts = 0

    def load(self, path: str, threads: int, properties: dict[str, str] | None = None) -> dict[str, Any]:
        import openvino
        import openvino_genai

        self._base = peak_rss_bytes() or 0
        self._vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        options = {"ATTENTION_BACKEND": "PA", "INFERENCE_NUM_THREADS": str(threads), **(properties or {})}
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", **options)
        return {"version": openvino_genai.__version__, "openvino": openvino.__version__}

    def context(self, ctx: int) -> dict[str, Any]:
        return {}  # the pipeline takes blocks as they are needed

    def _generate(self, ids: list[int], tokens: int) -> Any:
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.eos_token_id, config.do_sample = tokens, True, 2, False
        prompt = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        return self._pipeline.generate(inputs, config).perf_metrics

    def run(self, kind: str, tokens: int, depth: int) -> dict[str, Any]:
        before = token_ids(self._vocab_size, max(depth, 1))
        if kind == "pp":
            self._prompts += 1
            shift, limit = 31 * self._prompts, self._vocab_size - 3
            new = [3 + (token + shift) % limit for token in token_ids(self._vocab_size, tokens)]
            return {"seconds": self._generate(before[:depth] + new, 1).get_ttft().mean / 1e3}
        metrics = self._generate(before, tokens + 1)
        microseconds = list(metrics.raw_metrics.m_durations)
        if len(microseconds) != tokens:
            raise RuntimeError(f"the pipeline timed {len(microseconds)} tokens of {tokens}")
        return {"seconds": sum(microseconds) / 1e6}

    def memory(self) -> dict[str, Any]:
        return {"peak_rss_bytes": peak_rss_bytes(), "base_rss_bytes": self._base}

    def first_token(self, path: str, threads: int, ctx: int) -> dict[str, Any]:
        self.load(path, threads)
        self._generate(token_ids(self._vocab_size, 8), 1)
        return {"ms": process_age_ms()}


if __name__ == "__main__":
    worker = OpenVino()
    serve({name: getattr(worker, name) for name in ("load", "context", "run", "memory", "first_token")})
