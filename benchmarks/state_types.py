"""Cost of a recurrent state in fewer bits: divergence from a state in float64, and how it grows with the context.

    python benchmarks/state_types.py CHECKPOINT --text FILE... [--separator TEXT] [--windows N] [--to PAGE]

CHECKPOINT is a Qwen3.5 (`benchmarks/train_fables_delta.py` trains one). transformers computes it in float32, and this
script computes its delta rules token by token in float64, with the state rounded to a type after every token, or every
16th, as if it were kept in registers between them. Windows of the text do not see each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.harness import describe, publish, row, table
from edgeinfer.quality.evaluate import token_stream
from edgeinfer.text import Tokenizer

ROWS = 4
"""Windows computed together."""
FIRST_END = 256
"""End of the first range of positions; each further range ends at twice the position."""


@dataclass(frozen=True)
class State:
    """A type of the state, and the number of tokens after which it is rounded to it."""

    dtype: torch.dtype
    every: int = 1

    @property
    def name(self) -> str:
        """Name in tables."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.every == 1 else f"{name}, rounded every {self.every} tokens"


EXACT = State(torch.float64)
STATES = (State(torch.float32), State(torch.float16), State(torch.float16, 16), State(torch.bfloat16),
          State(torch.bfloat16, 16))


@dataclass
class Cost:
    """Differences from the exact state, summed over windows."""

    divergences: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    differences: list[Tensor] = field(default_factory=list)
    """Per window and position, the largest difference of a logit."""


def delta_rule(state_type: State, largest: list[float]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return transformers' function of the delta rule with a rounded state; `largest` collects its magnitudes."""

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
             output_final_state: bool = False, **_: Any) -> tuple[Tensor, Tensor | None]:
        each = value.shape[2] // key.shape[2]
        q, k = (_unit(x.double()).repeat_interleave(each, 2) for x in (query, key))
        q, k, v, beta, decay = q * q.shape[-1] ** -0.5, k, value.double(), beta.double(), g.double().exp()
        rows, tokens, heads, size = v.shape
        state, out = v.new_zeros(rows, heads, k.shape[-1], size), torch.empty_like(v)
        for t in range(tokens):
            state = state * decay[:, t, :, None, None]
            change = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
            state = state + k[:, t, :, :, None] * change[:, :, None]
            out[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
            if (t + 1) % state_type.every == 0:
                state = state.to(state_type.dtype).double()
        largest.append(float(state.abs().max()))
        return out.to(query.dtype), None

    return rule


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def windows(checkpoint: Path, text: str, separator: str, window: int, most: int | None, bos: int | None
            ) -> Iterator[Tensor]:
    """Yield token ids of a few whole windows at a time, one more than a window has in each row."""
    ids = token_stream(Tokenizer.open(checkpoint, {"bos_token_id": bos}), text, separator).ids
    rows = [ids[start : start + window + 1] for start in range(0, len(ids) - window, window)][:most]
    for first in range(0, len(rows), ROWS):
        yield torch.tensor(rows[first : first + ROWS])


def logits_of(model: Any, ids: Tensor, state_type: State, largest: list[float]) -> Tensor:
    """Return logits after all tokens but the last."""
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule(state_type, largest)
    with torch.no_grad():
        return model(ids[:, :-1], use_cache=False).logits


def measure(checkpoint: Path, text: str, separator: str, window: int, most: int | None = None,
            states: tuple[State, ...] = STATES) -> tuple[dict[State, Cost], float, float]:
    """Return the cost of each type, the largest logit and the largest magnitude of a state at the end of a window."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    costs: dict[State, Cost] = {state: Cost() for state in states}
    scale, largest = 0.0, [0.0]
    for ids in windows(checkpoint, text, separator, window, most, model.config.bos_token_id):
        exact = logits_of(model, ids, EXACT, largest)
        logprobs = exact.double().log_softmax(-1)
        scale = max(scale, float(exact.abs().max()))
        for state, cost in costs.items():
            logits = logits_of(model, ids, state, [])
            other = logits.double().log_softmax(-1)
            cost.divergences.append((logprobs.exp() * (logprobs - other)).sum(-1).clamp(min=0).flatten())
            cost.same.append((logits.argmax(-1) == exact.argmax(-1)).flatten())
            cost.differences.append((logits - exact).abs().amax(-1))
        print(f"{len(ids)} windows", file=sys.stderr, flush=True)
    return costs, scale, max(largest)


def ranges(window: int) -> list[tuple[int, int]]:
    """Return first and last positions of the columns: to 256, to 512, and so on."""
    ends = [FIRST_END]
    while ends[-1] < window:
        ends.append(min(2 * ends[-1], window))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def report(costs: dict[State, Cost], scale: float, largest: float, window: int) -> str:
    """Return the table in Markdown."""
    rows = []
    for state, cost in costs.items():
        klds, differences = torch.cat(cost.divergences), torch.cat(cost.differences)
        parts = [f"{float(differences[:, first:last].max()) / scale:.1e}" for first, last in ranges(window)]
        rows.append(row(state.name, f"{float(klds.mean()):.1e}", f"{float(klds.quantile(0.99)):.1e}",
                        f"{1 - float(torch.cat(cost.same).double().mean()):.2%}", *parts))
    tokens = len(torch.cat(next(iter(costs.values())).divergences))
    heads = " | ".join(f"tokens {first + 1} to {last}" for first, last in ranges(window))
    return (f"{tokens} tokens in windows of {window}; largest logit {scale:.1f}, largest element of a state at the end "
            f"of a window {largest:.2f}.\n\n"
            + table(f"state | KLD mean | KLD 99 % | other top token | {heads}", rows, right=True))


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Cost of recurrent states in fewer bits.")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory of a Qwen3.5")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="held-out texts (UTF-8)")
    parser.add_argument("--separator", default="\f", help=r"between documents, such as \n\n\n (default: form feeds)")
    parser.add_argument("--window", type=int, default=2048, help="tokens that see each other")
    parser.add_argument("--windows", type=int, metavar="N", help="most windows of each text (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, metavar="PAGE", help="write the tables into this page's section")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    separator = given.separator.replace("\\n", "\n").replace("\\f", "\f")
    parts = [f"Measured on {', '.join(describe().values())}; torch {torch.__version__}."]
    for path in given.text:
        found = measure(given.checkpoint, path.read_text(encoding="utf-8"), separator, given.window,
                        given.windows)
        parts += [f"{given.checkpoint.name} on {path.stem}:", report(*found, given.window)]
    publish("\n\n".join(parts), given.to, "state-types")
    return 0


if __name__ == "__main__":
    sys.exit(main())
