"""Train fables-5m-delta: a small Qwen3.5 (three layers with gated delta rules, one with attention) on the CPU.

    python benchmarks/train_fables_delta.py --like fables-5m-silu --text tales.txt.xz 0.9 --text stories.txt 0.1
        --held-out FILE... --out fables-5m-delta

The model has the tokenizer of the Llama in `--like` and begins with its embeddings and FFNs, which saves most of the
training. Lines of the held-out texts are left out of the training texts. Each step takes 2,048 tokens, as four windows
of 512 or, every fourth step, as one of 2,048. All random numbers follow from `--seed` and the number of the step, so a
run that is stopped and started again with `--resume` takes the steps that it would have taken.

The rule runs in chunks (arXiv 2406.06484, 2412.06464): transformers computes them on a CPU, too, but its gradients by
chunk fill whole tensors with zeros, at less than half the speed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAYON_NUM_THREADS", "1")  # of the tokenizers package
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 32
TOKENS, WINDOW, LONG_EVERY = 2048, 512, 4
WARM_UP, LAST_RATE = 0.03, 0.05
"""Share of the steps until the full learning rate, and the share of it that is left at the end."""
KNOWN_LINE = 20
"""Characters from which a line of a held-out text is recognised in a training text."""
STORY = "\n\nOnce upon a time"
"""The beginning of a document in a text without form feeds."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json")
SHAPE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": TOKENS,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


# -- the delta rule ----------------------------------------------------------------------------------------------------


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
               output_final_state: bool = False, **_: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule in chunks, with the arguments of transformers' function.

    Parameters
    ----------
    query, key : of shape (batch, tokens, key heads, key size)
    value : of shape (batch, tokens, value heads, value size)
    g, beta : logarithm of the decay and strength of the change, of shape (batch, tokens, value heads)
    initial_state : of shape (batch, value heads, key size, value size), or None for zeros
    output_final_state : whether to return the state, too
    """
    tokens, each = value.shape[1], value.shape[2] // key.shape[2]
    q, k, v, g, beta = (_in_chunks(x) for x in (_unit(query), _unit(key), value, g[..., None], beta[..., None]))
    products = torch.cat((k, q * q.shape[-1] ** -0.5), 3) @ k.transpose(-1, -2)
    q, k, products = (x.repeat_interleave(each, 1) for x in (q, k, products))
    total = g.cumsum(3)
    decay = total.exp()
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (total - total.transpose(-1, -2)).masked_fill(later, -math.inf).exp()
    among, scores = (products * torch.cat((between, between), 3)).split(CHUNK, 3)
    # What each token changes, given the state before the chunk: a triangular system, since each sees those before it.
    changes = torch.linalg.solve_triangular(among * beta, torch.cat((v, k * decay), 4) * beta, upper=False,
                                            unitriangular=True)
    new, old = changes.split((v.shape[-1], k.shape[-1]), 4)
    reads = torch.cat((old, q * (decay * q.shape[-1] ** -0.5)), 3)
    writes = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    out = []
    for parts in zip(*(x.unbind(2) for x in (new, reads, scores, writes, decay[..., -1:, :])), strict=True):
        new_i, reads_i, scores_i, writes_i, decay_i = parts
        known, read = (reads_i @ state).split(CHUNK, 2)
        change = new_i - known
        out.append(read + scores_i @ change)
        state = state * decay_i + writes_i @ change
    whole = torch.cat(out, 2)[:, :, :tokens].transpose(1, 2).contiguous()
    return whole, state if output_final_state else None


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _in_chunks(x: Tensor) -> Tensor:
    """Return (batch, tokens, heads, size) as (batch, heads, chunks, CHUNK, size), with zeros at the end."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.reshape(*x.shape[:2], -1, CHUNK, x.shape[-1])


# -- texts -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> str:
    """Return a text, which may be compressed."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return raw.decode("utf-8")


def documents(text: str, held_out: set[str]) -> Iterator[str]:
    """Yield documents without blank lines and without lines that are held out."""
    for document in (text if "\f" in text else text.replace(STORY, "\f" + STORY)).split("\f"):
        lines = [line for line in document.split("\n") if line and line not in held_out]
        if lines:
            yield "\n".join(lines)


def tokens_of(given: argparse.Namespace) -> list[np.ndarray]:
    """Return the tokens of each text, which are kept for `--resume`; documents begin with that of beginnings."""
    kept = given.out / "tokens.npz"
    if given.resume and kept.exists():
        return list(np.load(kept).values())
    tokenizer = Tokenizer.from_file(str(given.like / "tokenizer.json"))
    known = {line for path in given.held_out for line in read(path).split("\n") if len(line) >= KNOWN_LINE}
    found = []
    for path, _ in given.text:
        ids: list[int] = []
        for document in documents(read(Path(path)), known):
            ids += [SHAPE["bos_token_id"], *tokenizer.encode(document, add_special_tokens=False).ids]
        found.append(np.array(ids, np.uint16))
        print(f"{Path(path).name}: {len(ids)} tokens", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    np.savez(kept, *found)
    return found


def batch(streams: list[np.ndarray], shares: list[float], seed: int, step: int) -> Tensor:
    """Return the token ids of a step, one more than a window has in each row."""
    rng = random.Random(f"{seed} {step}")
    length = TOKENS if step % LONG_EVERY == LONG_EVERY - 1 else WINDOW
    rows = []
    for stream in rng.choices(streams, shares, k=TOKENS // length):
        start = rng.randrange(len(stream) - length)
        rows.append(stream[start : start + length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


# -- the model ---------------------------------------------------------------------------------------------------------


def begin(like: Path, seed: int) -> Qwen3_5ForCausalLM:
    """Return a model with random mixers and the embeddings, last norm and FFNs of a Llama.

    Decays begin as Mamba's do, from 0.999 to 0.2 per token: transformers' own would forget within a token or two.
    """
    torch.manual_seed(seed)
    other = {name: values.float() for name, values in load_file(like / "model.safetensors").items()}
    vocabulary = len(other["model.embed_tokens.weight"])
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=vocabulary, **SHAPE))
    own, layers = model.state_dict(), json.loads((like / "config.json").read_text("utf-8"))["num_hidden_layers"]
    own["model.embed_tokens.weight"].copy_(other["model.embed_tokens.weight"])
    own["model.norm.weight"].copy_(other["model.norm.weight"] - 1)
    last = SHAPE["num_hidden_layers"] - 1
    for i in range(last + 1):
        source, name = f"model.layers.{round(i * (layers - 1) / last)}.", f"model.layers.{i}."
        for part in ("gate_proj", "up_proj", "down_proj"):
            own[f"{name}mlp.{part}.weight"].copy_(other[f"{source}mlp.{part}.weight"])
        for part in ("post_attention_layernorm", "input_layernorm"):
            own[f"{name}{part}.weight"].copy_(other[f"{source}{part}.weight"] - 1)
        if (bias := own.get(f"{name}linear_attn.dt_bias")) is not None:
            steps = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)))
            bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus(bias) is the step
            own[f"{name}linear_attn.A_log"].copy_(torch.log(torch.empty_like(bias).uniform_(1, 16)))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Decay matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.97))


def rate(step: int, steps: int, highest: float) -> float:
    """Learning rate: linear warm-up, then a cosine."""
    warm = WARM_UP * steps
    if step < warm:
        return highest * (step + 1) / (warm + 1)
    done = (step - warm) / (steps - warm)
    return highest * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


def save(model: Qwen3_5ForCausalLM, optimizer: torch.optim.AdamW, step: int, out: Path, like: Path) -> None:
    """Write the checkpoint in float16, and what `--resume` needs beside it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (like / name).exists():
            shutil.copyfile(like / name, out / name)
    config = {**model.config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float16"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {name: values.half() for name, values in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, out / "training.part")
    os.replace(out / "training.part", out / "training.pt")


def restore(model: Qwen3_5ForCausalLM, optimizer: torch.optim.AdamW, out: Path) -> int:
    """Return to what `save` wrote; returns the number of steps taken."""
    state = torch.load(out / "training.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def train(given: argparse.Namespace) -> None:
    """Train from `--like` or from what was saved."""
    torch.set_num_threads(given.threads)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    model = begin(given.like, given.seed)
    optimizer = optimizer_of(model)
    first = restore(model, optimizer, given.out) if given.resume else 0
    print(f"{sum(p.numel() for p in model.parameters())} parameters, from step {first}", flush=True)
    streams, shares = tokens_of(given), [float(share) for _, share in given.text]
    mean, began = 0.0, time.perf_counter()
    end = min(given.steps, given.stop or given.steps)
    for step in range(first, end):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, given.steps, given.rate)
        ids = batch(streams, shares, given.seed, step)
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if step == first else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % given.every == 0 or step + 1 == end:
            speed = (step + 1 - first) * TOKENS / (time.perf_counter() - began)
            save(model, optimizer, step + 1, given.out, given.like)
            print(f"step {step + 1}: loss {mean:.4f}, {speed:.0f} tokens/s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a small Qwen3.5 on stories.")
    parser.add_argument("--like", type=Path, required=True, metavar="DIR", help="checkpoint of a Llama to begin with")
    parser.add_argument("--text", nargs=2, action="append", required=True, metavar=("FILE", "SHARE"),
                        help="a training text (UTF-8, or that in .xz) and its share of the windows")
    parser.add_argument("--held-out", nargs="*", type=Path, default=[], metavar="FILE", help="texts to leave out")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the checkpoint to write")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--steps", type=int, default=2000, help=f"of {TOKENS} tokens")
    parser.add_argument("--stop", type=int, metavar="STEP", help="end after this step; continue with --resume")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--threads", type=int, default=1)
    train(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
