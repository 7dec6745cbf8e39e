"""llama.cpp's worker, run in the environment of llama-cpp-python: its low-level functions, no sampling."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from serving import Runner, peak_rss_bytes, process_age_ms, random_ids, serve, token_ids

UBATCH = 512
"""llama.cpp's own default, and that of llama-bench."""


class LlamaCpp:
    """One model; its context is made again for each setting."""

    def __init__(self) -> None:
        self._model: Any = None
        self._context: Any = None
        self._runner: Runner | None = None
        self._threads = self._base = self._vocab_size = 0

    def load(self, path: str, threads: int, mapped: bool = False) -> dict[str, Any]:
        """Open a model; `mapped` leaves all weights in pages of the file: rearranged, they would be memory taken."""
        import llama_cpp as lib

        self._base, self._threads = peak_rss_bytes() or 0, threads
        self._silence = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        if mapped:
            parameters.use_extra_bufts = False
            if hasattr(parameters, "load_mode"):
                parameters.load_mode = lib.LLAMA_LOAD_MODE_MMAP
            else:  # as it was before 2026
                parameters.use_mmap = True
        began = time.perf_counter()
        self._model = lib.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        load_ms = 1000 * (time.perf_counter() - began)
        return {"version": f"by llama-cpp-python {lib.__version__}", "load_ms": load_ms,
                "features": lib.llama_print_system_info().decode().strip()}

    def context(self, ctx: int, kv: str = "f16", flash: bool = True) -> dict[str, Any]:
        import llama_cpp as lib

        if self._context:
            lib.llama_free(self._context)
        kind = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}[kv]
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = ctx, max(UBATCH, 2048), UBATCH, 1
        p.n_threads = p.n_threads_batch = self._threads
        p.type_k = p.type_v = kind
        p.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        p.no_perf = True
        self._context = lib.llama_init_from_model(self._model, p)
        if not self._context:
            raise RuntimeError(f"llama.cpp refuses a context of {ctx} tokens with {kv} keys and values, flash={flash}")
        self._runner = Runner(self._vocab_size, self._process, self._truncate)
        return {}

    def _process(self, ids: list[int]) -> None:
        import llama_cpp as lib

        for start in range(0, len(ids), 2048):
            part = ids[start : start + 2048]
            tokens = (lib.llama_token * len(part))(*part)
            status = lib.llama_decode(self._context, lib.llama_batch_get_one(tokens, len(part)))
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        lib.llama_synchronize(self._context)
        lib.llama_get_logits_ith(self._context, -1)

    def _truncate(self, n_tokens: int) -> None:
        import llama_cpp as lib

        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, n_tokens, -1)

    def run(self, kind: str, tokens: int, depth: int) -> dict[str, Any]:
        return self._runner.run(kind, tokens, depth)

    def decode(self, tokens: int, seed: int | None = None) -> dict[str, Any]:
        """Take the time of decoding tokens in a new sequence, after one that does not count; a seed gives others."""
        self._truncate(0)
        times = []
        ids = token_ids(self._vocab_size, tokens + 1)
        if seed is not None:
            ids = random_ids(seed, self._vocab_size, tokens + 1)
        for token in ids:
            began = time.perf_counter()
            self._process([token])
            times.append(time.perf_counter() - began)
        return {"seconds": times[1:]}

    def prompt(self, tokens: int, seed: int) -> dict[str, Any]:
        """Take the time of a prompt of tokens in no order."""
        self._truncate(0)
        ids = random_ids(seed, self._vocab_size, tokens)
        began = time.perf_counter()
        self._process(ids)
        return {"seconds": [time.perf_counter() - began]}

    def memory(self) -> dict[str, Any]:
        return {"peak_rss_bytes": peak_rss_bytes(), "base_rss_bytes": self._base}

    def first_token(self, path: str, threads: int, ctx: int) -> dict[str, Any]:
        self.load(path, threads)
        self.context(ctx)
        self._process(token_ids(self._vocab_size, 8))
        return {"ms": process_age_ms()}


if __name__ == "__main__":
    worker = LlamaCpp()
    names = ("load", "context", "run", "decode", "prompt", "memory", "first_token")
    serve({name: getattr(worker, name) for name in names})
