"""What a cache of experts hits in real routing, and what reading ahead of the router would add.

    python benchmarks/routing_traces.py train MODEL TEXT.txt.xz HELD_OUT.txt traces.npz [--minutes 8]
    python benchmarks/routing_traces.py simulate traces.npz

`train` takes a small dense Llama (MODEL, a checkpoint with tokenizer.json), makes each FFN a mixture of 16 experts of a
quarter of its size, 4 active (parts of the FFN, four copies of each, with noise: arXiv 2212.05055), trains it on TEXT
with a loss that balances the load (arXiv 2101.03961), and records what the tokens of HELD_OUT choose. It takes torch,
transformers and tokenizers. Beside each choice it records what the layer's router would have chosen from earlier
states: from what the router of the layer before saw (arXiv 2312.17238), and from what that layer put out.

`simulate` lets caches of some sizes, replaced by counts as kernels/ops/experts_resolve.py does it, follow the traces,
and says of the misses which share was foreseen, and how many of the reads that this would have begun were wanted. Then
what that is worth where reads and computation of a layer take times of some ratio: what is read ahead costs no less, it
only runs while the layer computes, and a read that was not wanted takes the time of one that was. docs/experts.md has
the outcome.
"""

from __future__ import annotations

import argparse
import lzma
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/routing_traces.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

EXPERTS, ACTIVE, PARTS = 16, 4, 4
LENGTH, BATCH, RATE, BALANCE = 256, 8, 6e-4, 0.02
COUNTED = 64
"""Tokens after which counts halve."""
SHARES = (0.3, 0.43, 0.6)
"""Of all experts that the cache holds; 0.43 is what 8 GiB leave to Qwen3-30B-A3B in q4."""
RATIOS = (0.5, 1.0, 2.0, 4.0)
"""Time to read what a layer misses, in times that its computation takes."""
SEEN = ("the token before", "the router before", "the layer before")
LEADS = (1.0, 1.0, 1 / 3)
"""Share of a layer's computation that each leaves to read in: behind a layer's FFN only attention is left, which is a
third of Qwen3-30B-A3B's."""
Choices = NDArray[np.int64]


def mixture_class() -> Any:
    """The FFN's module; torch is imported for who trains."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Mixture(nn.Module):
        """Experts made of a dense FFN."""

        def __init__(self, dense: Any):
            super().__init__()
            width = dense.gate_proj.weight.shape[0] // PARTS

            def copied(parts: Any) -> Any:
                whole = torch.stack([parts[i % PARTS] for i in range(EXPERTS)]).float()
                return nn.Parameter(whole + 0.3 * whole.std() * torch.randn_like(whole))

            self.gate = copied(dense.gate_proj.weight.detach().split(width))
            self.up = copied(dense.up_proj.weight.detach().split(width))
            self.down = copied(dense.down_proj.weight.detach().split(width, dim=1))
            self.router = nn.Parameter(0.02 * torch.randn(EXPERTS, dense.gate_proj.weight.shape[1]))
            self.balance: Any = 0.0
            self.seen: Any = None
            self.chosen: Any = None

        def forward(self, x: Any) -> Any:
            rows = x.reshape(-1, x.shape[-1])
            scores = functional.softmax(rows @ self.router.T, dim=-1)
            weights, chosen = scores.topk(ACTIVE, dim=-1)
            share = torch.zeros(EXPERTS).index_add_(0, chosen.reshape(-1), torch.ones(chosen.numel())) / chosen.numel()
            self.balance, self.chosen = EXPERTS * (share * scores.mean(0)).sum(), chosen
            weights = PARTS * weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(rows)
            for e in range(EXPERTS):
                token, place = (chosen == e).nonzero(as_tuple=True)
                own = rows[token]
                inner = functional.silu(own @ self.gate[e].T) * (own @ self.up[e].T)
                out = out.index_add(0, token, (inner @ self.down[e].T) * weights[token, place, None])
            return out.view_as(x)

    return Mixture


def trained(path: Path, ids: Choices, minutes: float) -> Any:
    """The mixture, after so many minutes on the text."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    mixture = mixture_class()
    for layer in model.model.layers:
        layer.mlp = mixture(layer.mlp)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.01)
    random, began, step, seconds = np.random.default_rng(0), time.process_time(), 0, 60 * minutes
    while (spent := time.process_time() - began) < seconds:
        starts = random.integers(len(ids) - LENGTH, size=BATCH)
        batch = torch.from_numpy(np.stack([ids[s : s + LENGTH] for s in starts]))
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 50, 1.02 - spent / seconds)
        loss = model(input_ids=batch, labels=batch).loss
        balance = sum(layer.mlp.balance for layer in model.model.layers) / len(model.model.layers)
        optimiser.zero_grad()
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {spent:.0f} s: loss {loss.item():.3f}, balance {balance.item():.3f}", flush=True)
    return model


def traced(model: Any, ids: Choices) -> dict[str, Choices]:
    """What each token chose in each layer, int (T, layers, ACTIVE), and what would have been chosen from earlier."""
    import torch

    model.eval()
    layers, found = model.model.layers, {"chosen": [], SEEN[1]: [], SEEN[2]: []}
    states: dict[int, dict[str, Any]] = {i: {} for i in range(len(layers))}
    hooks = []
    for i, layer in enumerate(layers):
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _m, args, i=i: states[i].update(inside=args[0])))
        hooks.append(layer.register_forward_hook(
            lambda _m, _a, out, i=i: states[i].update(out=out[0] if isinstance(out, tuple) else out)))
    losses = []

    def best(state: Any, i: int) -> Any:
        rows = layers[i].post_attention_layernorm(state)[0]
        return (rows @ layers[i].mlp.router.T).topk(ACTIVE, dim=-1).indices.numpy()

    with torch.no_grad():
        for start in range(0, len(ids) - LENGTH, LENGTH):
            part = torch.from_numpy(ids[None, start : start + LENGTH])
            losses.append(model(input_ids=part, labels=part).loss.item())
            own = [layer.mlp.chosen.numpy() for layer in layers]
            found["chosen"].append(np.stack(own, 1))
            for name, key in ((SEEN[1], "inside"), (SEEN[2], "out")):
                ahead = [own[0], *(best(states[i - 1][key], i) for i in range(1, len(layers)))]
                found[name].append(np.stack(ahead, 1))
    print(f"held-out text: {np.mean(losses):.3f} nats a token")
    return {name: np.concatenate(parts) for name, parts in found.items()}


def train(asked: argparse.Namespace) -> None:
    """Make the mixture and its traces."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    with lzma.open(asked.text, "rt", encoding="utf-8") as file:
        text = file.read(5_000_000)
    ids = np.concatenate([np.array(tokenizer.encode(part).ids) for part in text.split("\f")])
    held_out = np.array(tokenizer.encode(asked.held_out.read_text(encoding="utf-8")).ids)[: asked.tokens]
    traces = traced(trained(asked.model, ids, asked.minutes), held_out)
    np.savez_compressed(asked.traces, **{name.replace(" ", "_"): value for name, value in traces.items()})


class Outcome(NamedTuple):
    """Of a cache that followed the traces, a token and layer on average (layers behind the first)."""

    hits: float
    """Share of the wanted experts that were there."""
    missing: float
    foreseen: list[float]
    """Share of those missing that each way foresaw."""
    begun: list[float]
    """Reads that each way would have begun."""


def follow(chosen: Choices, foreseen: dict[str, Choices], share: float) -> Outcome:
    """Let a cache of this share of all experts follow the traces."""
    tokens, layers, active = chosen.shape
    n = int(chosen.max()) + 1
    slots, counts = max(n, round(share * n * layers)), np.zeros(n * layers)
    there, last = np.zeros(n * layers, bool), np.zeros(n * layers, np.int64)
    wanted = missing = clock = 0
    found, begun = np.zeros(len(SEEN)), np.zeros(len(SEEN))
    for t in range(tokens):
        if t % COUNTED == 0:
            counts //= 2
        for i in range(layers):
            own, clock = n * i + chosen[t, i], clock + 1
            absent = own[~there[own]]
            if t >= tokens // 4 and i:  # when the cache is warm
                wanted, missing = wanted + active, missing + len(absent)
                ways = (chosen[t - 1, i], foreseen[SEEN[1]][t, i], foreseen[SEEN[2]][t, i])
                for number, way in enumerate(ways):
                    reads = n * i + way[~there[n * i + way]]
                    found[number] += np.isin(reads, absent).sum()
                    begun[number] += len(reads)
            counts[own] += 256
            last[own] = clock
            excess = int(there.sum()) + len(absent) - slots
            if excess > 0:
                held = np.flatnonzero(there & (last < clock))
                there[held[np.lexsort((last[held], counts[held]))[:excess]]] = False
            there[own] = True
    steps = wanted / active
    return Outcome(1 - missing / wanted, missing / steps, list(found / max(missing, 1)), list(begun / steps))


def gain(ratio: float, foreseen: float, precision: float, lead: float) -> float:
    """How many times faster tokens come where a layer's missing experts take `ratio` times its computation to read.

    What the next layer is thought to want is read while there is computation left, which takes `lead`; what was begun
    then and is wanted need not be read later, of the rest nothing is begun.
    """
    begun = min(lead, ratio * foreseen / max(precision, 1e-9))
    return (1 + ratio) / (1 + ratio - begun * precision)


def simulate(asked: argparse.Namespace) -> None:
    """Print the tables."""
    with np.load(asked.traces) as data:
        chosen, foreseen = data["chosen"], {name: data[name.replace(" ", "_")] for name in SEEN[1:]}
    tokens, layers, active = chosen.shape
    rates = np.sort([np.bincount(chosen[:, i].reshape(-1), minlength=EXPERTS) for i in range(layers)], axis=1)
    again = np.mean([np.isin(chosen[t, i], chosen[t - 1, i]).mean() for t in range(1, tokens) for i in range(layers)])
    print(f"{tokens} tokens, {layers} layers of {EXPERTS} experts, {active} active; the busier half takes "
          f"{rates[:, EXPERTS // 2 :].sum() / rates.sum():.0%}; of a token's experts the one before had {again:.0%}")
    for name, other in foreseen.items():
        right = np.mean([np.isin(other[t, i], chosen[t, i]).mean() for t in range(tokens) for i in range(1, layers)])
        print(f"from {name}: {right:.0%} of all experts")
    print("| in memory | hits | seen from | of the misses | of the reads wanted | "
          + " | ".join(f"reads {ratio:g}x computation" for ratio in RATIOS) + " |\n" + "|---" * (5 + len(RATIOS)) + "|")
    for share in SHARES:
        outcome = follow(chosen, foreseen, share)
        for name, lead, seen, begun in zip(SEEN, LEADS, outcome.foreseen, outcome.begun, strict=True):
            precision = seen * outcome.missing / begun if begun else 0.0
            gains = " | ".join(f"{gain(ratio, seen, precision, lead):.2f}" for ratio in RATIOS)
            print(f"| {share:.0%} | {outcome.hits:.0%} | {name} | {seen:.0%} | {precision:.0%} | {gains} |")


def main() -> None:
    """Do what is asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = options.add_subparsers(required=True)
    one = steps.add_parser("train")
    for name in ("model", "text", "held_out", "traces"):
        one.add_argument(name, type=Path)
    one.add_argument("--minutes", type=float, default=8.0, help="of processor time")
    one.add_argument("--tokens", type=int, default=8192, help="of the held-out text")
    one.set_defaults(run=train)
    two = steps.add_parser("simulate")
    two.add_argument("traces", type=Path)
    two.set_defaults(run=simulate)
    asked = options.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
