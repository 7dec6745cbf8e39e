"""An architecture is one file: two toys whose checkpoints are fused, folded and stacked, against plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import Checkpoint, convert
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import Graph, Source, Weight, architectures, build_graph, requested_types, supported_architectures
from tests.helpers.checkpoints import make_checkpoint, read_tensors, refused, save_tensors
from tests.helpers.sessions import logits_of, scored, session, tokens

Tensors = dict[str, np.ndarray]
QKV = "model.layers.1.self_attn.qkv_proj.weight"
BOUND, EXPECTED = 1e-3, 1e-5
"""Largest difference over the largest logit: what an architecture must keep, and what float32 reaches."""


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the package's architectures, those in tests/architectures."""
    here = str(Path(__file__).parents[1] / "architectures")
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, here])
    assert {"toy_fused", "toy_stacked"} < set(supported_architectures())


# -- the models in plain NumPy, on the tensors as the checkpoint has them ---------------------------------------------


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, pairs: bool) -> np.ndarray:
    """Causal attention of 4 heads over 2; element 2 i of a head turns with 2 i + 1 (pairs), or i with i + d / 2."""
    n = len(q)
    q, k, v = q.reshape(n, 4, -1), k.reshape(n, 2, -1), v.reshape(n, 2, -1)
    d = q.shape[-1]
    angles = np.arange(n)[:, None, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    first, second = (slice(0, d, 2), slice(1, d, 2)) if pairs else (slice(0, d // 2), slice(d // 2, d))
    q, k = (turned(x, first, second, np.cos(angles), np.sin(angles)) for x in (q, k))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(d) + np.triu(np.full((n, n), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)


def turned(x: np.ndarray, first: slice, second: slice, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def gated(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def fused_forward(t: Tensors, ids: list[int]) -> np.ndarray:
    table = t["model.embed_tokens.weight"]
    x = table[ids] * math.sqrt(table.shape[1])
    for i in range(2):
        layer = {name.removeprefix(f"model.layers.{i}."): values for name, values in t.items()}
        h = normed(x, 1 + layer["input_layernorm.weight"])
        qkv = h @ layer["self_attn.qkv_proj.weight"].T + layer.get("self_attn.qkv_proj.bias", 0)
        a = attended(*np.split(qkv, [48, 72], axis=1), pairs=False)
        x = x + a @ layer["self_attn.o_proj.weight"].T + layer.get("self_attn.o_proj.bias", 0)
        h = normed(x, 1 + layer["post_attention_layernorm.weight"])
        x = x + gated(*np.split(h @ layer["mlp.gate_up_proj.weight"].T, 2, axis=1)) @ layer["mlp.down_proj.weight"].T
    return normed(x, 1 + t["model.norm.weight"]) @ t.get("lm_head.weight", table).T


def stacked_forward(t: Tensors, ids: list[int]) -> np.ndarray:
    x = t["wte"][ids]
    for i in range(2):
        h = normed(x, t["h.norm_1"][i])
        q, k, v = (h @ t[f"h.{p}"][i] + t[f"h.{p}_bias"][i] for p in "qkv")
        x = x + attended(q, k, v, pairs=True) @ t["h.o"][i]
        both = normed(x, t["h.norm_2"][i]) @ t["h.gate_up"][i]
        x = x + gated(both[:, ::2], both[:, 1::2]) @ t["h.down"][i]
    return normed(x, t["norm_f"]) @ t["head"]


CASES: list[tuple[str, dict[str, object], Callable[[Tensors, list[int]], np.ndarray]]] = [
    ("toy_fused", {"tie_word_embeddings": True}, fused_forward),
    ("toy_fused", {"attention_bias": True}, fused_forward),
    ("toy_stacked", {}, stacked_forward),
]


@pytest.mark.parametrize(("model_type", "fields", "forward"), CASES)
def test_logits_are_those_of_the_checkpoint(
    tmp_path: Path, model_type: str, fields: dict[str, object], forward: Callable[[Tensors, list[int]], np.ndarray]
) -> None:
    source = make_checkpoint(tmp_path / "hf", model_type, **fields)
    convert(source, tmp_path / "bundle", weights="f32")
    ids = tokens(70, vocab_size=300)
    expected = forward({name: values.astype(np.float64) for name, values in read_tensors(source).items()}, ids)
    with session(tmp_path / "bundle", kv="f32", threads=2, prefill_chunk=33, outputs=16) as opened:
        for logits, want in ((scored(opened, ids), expected), (logits_of(opened, ids, n_decoded=9), expected[-10:])):
            assert logits.shape == want.shape
            difference = np.abs(logits - want).max() / np.abs(want).max()
            assert difference <= EXPECTED < BOUND


def unfused(t: Tensors) -> Tensors:
    """The tensors of toy_fused as a plain llama has them."""
    scale, out = math.sqrt(48), {}
    for name, values in t.items():
        if "qkv_proj" in name:
            parts = zip("qkv", np.split(values, [48, 72]), strict=True)
            out.update({name.replace("qkv_proj", f"{p}_proj"): part for p, part in parts})
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), np.split(values, 2), strict=True)
            out.update({name.replace("gate_up_proj", f"{p}_proj"): part for p, part in parts})
        elif "embed_tokens" in name:
            out[name] = values * np.float32(scale)
        else:
            out[name] = values + np.float32(1) if "norm" in name else values
    out["model.norm.weight"] = out["model.norm.weight"] * np.float32(1 / scale)
    return out


@pytest.mark.parametrize("layout", ["tile16", "neuron"])
@pytest.mark.parametrize("weights", ["q4", "int8"])
def test_a_fused_checkpoint_gives_the_bundle_of_a_plain_one(tmp_path: Path, weights: str, layout: str) -> None:
    fused = make_checkpoint(tmp_path / "fused", "toy_fused", tie_word_embeddings=True)
    plain = make_checkpoint(tmp_path / "plain", "llama", tie_word_embeddings=True)
    save_tensors(plain, unfused(read_tensors(fused)))
    made = [tmp_path / "a", tmp_path / "b"]
    for source, bundle in zip((fused, plain), made, strict=True):
        convert(source, bundle, weights=weights, ffn_layout=layout)
    a, b = (Bundle.open(path) for path in made)
    assert a.header.tensors == b.header.tensors  # checksums too
    assert (a.path / "weights.bin").read_bytes() == (b.path / "weights.bin").read_bytes()


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model_type", ["toy_fused", "toy_stacked"])
def test_blocks_do_not_show_and_bound_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    source = make_checkpoint(tmp_path / "hf", model_type, hidden_size=96, intermediate_size=208, vocab_size=2000)
    convert(source, tmp_path / "whole", weights="int8")
    sizes, read = [], Checkpoint.read

    def watched(self: Checkpoint, name: str, starts: list[int], count: int) -> np.ndarray:
        sizes.append(len(starts) * count)
        return read(self, name, starts, count)

    monkeypatch.setattr(Checkpoint, "read", watched)
    for module in ("packing", "checkpoint.sources"):
        monkeypatch.setattr(f"edgeinfer.converters.{module}.BLOCK_WEIGHTS", 2048)
    convert(source, tmp_path / "pieces", weights="int8")
    assert max(sizes) <= 16 * 208  # a tile of rows is the least that is stored at a time
    assert Bundle.open(tmp_path / "whole").header.tensors == Bundle.open(tmp_path / "pieces").header.tensors


@pytest.mark.parametrize("model_type", ["toy_fused", "toy_stacked"])
def test_progress_counts_each_byte_once(tmp_path: Path, model_type: str) -> None:
    source = make_checkpoint(tmp_path / "hf", model_type)
    calls: list[tuple[int, int, str]] = []
    convert(source, tmp_path / "bundle", progress=lambda *call: calls.append(call))
    total = sum(values.nbytes for values in read_tensors(source).values())
    assert calls[-1][:2] == (total, total)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


# -- refusals ---------------------------------------------------------------------------------------------------------


def changed(source: Path, **tensors: np.ndarray | None) -> str:
    """The refusal after tensors were replaced or left out; dots in names are written as __."""
    have = {**read_tensors(source), **{name.replace("__", "."): values for name, values in tensors.items()}}
    save_tensors(source, {name: values for name, values in have.items() if values is not None})
    return refused(source, weights="f32")


def test_tensors_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    fused, stacked = (make_checkpoint(tmp_path / name, f"toy_{name}") for name in ("fused", "stacked"))
    assert changed(fused, model__layers__1__self_attn__qkv_proj__weight=np.ones((95, 48))) == (
        f"The tensor {QKV} in model.safetensors has shape [95, 48], but config.json needs [96, 48]."
    )
    assert changed(fused, model__layers__1__self_attn__qkv_proj__weight=None) == f"SOURCE lacks the tensor {QKV}."
    assert changed(stacked, h__q=np.ones((3, 48, 48))) == (
        "The tensor h.q in model.safetensors has shape [3, 48, 48], but config.json needs [2, 48, 48]."
    )


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """The place is that in the checkpoint, and the scaled value is told from the stored one."""
    fused, stacked = (make_checkpoint(tmp_path / name, f"toy_{name}") for name in ("fused", "stacked"))
    tensors = {**read_tensors(fused), **read_tensors(stacked)}
    tensors[QKV][50, 5] = np.nan
    assert changed(fused, **{QKV.replace(".", "__"): tensors[QKV]}) == (
        f"The tensor {QKV} has the value nan at [50, 5]; weights must be finite."
    )
    tensors["h.q"][1, 7, 21] = np.inf
    assert changed(stacked, h__q=tensors["h.q"]) == (
        "The tensor h.q has the value inf at [1, 7, 21]; weights must be finite."
    )
    tensors["h.q"][1, 7, 21], tensors["h.norm_2"][1, 9] = 0, -np.inf
    assert changed(stacked, h__q=tensors["h.q"], h__norm_2=tensors["h.norm_2"]) == (
        "The tensor h.norm_2 has the value -inf at [1, 9]; weights must be finite."
    )
    tensors["model.embed_tokens.weight"][299, 47] = -3e38
    assert changed(fused, model__embed_tokens__weight=tensors["model.embed_tokens.weight"]) == (
        "The tensor model.embed_tokens.weight after its steps has the value -inf at [299, 47]; weights must be finite."
    )


def altered(graph: Graph, weight: str, change: Callable[[tuple[Source, ...]], tuple[Source, ...]]) -> Graph:
    """The graph with other sources of one weight."""
    weights = tuple(replace(w, sources=change(w.sources)) if w.name == weight else w for w in graph.weights)
    return replace(graph, weights=weights)


WRONG: list[tuple[str, str, Callable[[tuple[Source, ...]], tuple[Source, ...]], str]] = [
    ("toy_fused", "layers.1.qkv", lambda s: s[1:], f"Rows 0 to 47 of the tensor {QKV} in FILE are not part of a "
     "toy_fused model; config.json and the weights do not fit together."),
    ("toy_fused", "layers.1.qkv", lambda s: (s[0], s[2]), f"Rows 48 to 71 of the tensor {QKV} in FILE are not part of"),
    ("toy_fused", "layers.1.qkv", lambda s: (*s, s[1]), f"Rows 48 to 71 of the tensor {QKV} in FILE belong to both "
     "layers.1.qkv and layers.1.qkv; the architecture's file must say so (shared)."),
    ("toy_fused", "layers.1.o", lambda s: (*s, Source(QKV, (96, 48)).rows(40, 44)),
     f"Rows 40 to 43 of the tensor {QKV} in FILE belong to both layers.1.qkv and layers.1.o; "),
    ("toy_stacked", "layers.1.o", lambda s: (s[0].rows(0, 40),), "Rows 0 to 47, columns 40 to 47 of the tensor "
     "h.o[1] in FILE are not part of a toy_stacked model"),
    ("toy_stacked", "layers.1.o", lambda s: (Source("h.o", (2, 48, 48)).item(0),), "Rows 0 to 47 of the tensor h.o[0] "
     "in FILE belong to both layers.0.o and layers.1.o; "),
    ("toy_stacked", "layers.0.down", lambda s: (Source("h.down", (2, 84, 48)).item(0).rows(1, 84),),
     "Rows 0 to 0 of the tensor h.down[0] in FILE are not part of a toy_stacked model"),
    ("toy_stacked", "layers.1.gate_up", lambda s: s[:1], "Rows 0 to 47, columns 1 to 1 of the tensor h.gate_up[1] "),
    ("toy_stacked", "layers.1.ffn_norm", lambda s: (s[0].rows(3, 48),), "Rows 1 to 1, columns 0 to 2 of the tensor "
     "h.norm_2 in FILE are not part of a toy_stacked model"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "weight", "change", "sentence"), WRONG, ids=range(len(WRONG)))
def test_parts_used_by_no_weight_or_by_two(
    tmp_path: Path, model_type: str, weight: str, change: Callable[[tuple[Source, ...]], tuple[Source, ...]],
    sentence: str,
) -> None:
    source = make_checkpoint(tmp_path / "hf", model_type)
    with Checkpoint.open(source) as checkpoint:
        graph = build_graph(checkpoint.config, requested_types("f32"))
        assert checkpoint.check(graph) == []
        with pytest.raises(CheckpointError) as caught:
            checkpoint.check(altered(graph, weight, change))
    text = str(caught.value).replace(str(source / "model.safetensors"), "FILE")
    assert text.startswith(sentence) and text.endswith(".")


def test_a_part_that_two_weights_share(tmp_path: Path) -> None:
    with Checkpoint.open(make_checkpoint(tmp_path / "hf", "toy_fused")) as checkpoint:
        graph = build_graph(checkpoint.config, requested_types("f32"))
        part = Source(QKV, (96, 48), shared=True).rows(40, 50)
        shared = altered(graph, "layers.1.o", lambda sources: (*sources, part))
        assert checkpoint.check(shared) == []
        third = Weight("third", (10, 48), "matrix", (replace(part, shared=False),))
        with pytest.raises(CheckpointError, match=r"^Rows 40 to 47 .* belong to both layers\.1\.qkv and third; "):
            checkpoint.check(replace(shared, weights=(*shared.weights, third)))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], Path]]:
    """Makes toy_fused under another name, with one text of its file replaced."""

    def plant(name: str, old: str, new: str) -> Path:
        text = (Path(__file__).parents[1] / "architectures/toy_fused.py").read_text()
        assert old in text
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / f"{name}.py").write_text(text.replace(old, new))
        monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path / "more")])
        source = make_checkpoint(tmp_path / "hf", "toy_fused")
        config = source / "config.json"
        config.write_text(config.read_text().replace("toy_fused", name))
        return source

    yield plant


def test_an_architecture_that_slices_beyond_its_tensor(planted: Callable[[str, str, str], Path]) -> None:
    source = planted("toy_beyond", "gate_up.rows(ffn, 2 * ffn)", "gate_up.rows(ffn, 2 * ffn + 1)")
    assert refused(source, UnsupportedModelError) == (
        "The tensor model.layers.0.mlp.gate_up_proj.weight of shape [168, 48] has no rows 84 to 168; config.json and "
        "the architecture do not fit together."
    )


def test_an_architecture_whose_slice_has_another_size(planted: Callable[[str, str, str], Path]) -> None:
    source = planted("toy_short", "gate_up.rows(ffn, 2 * ffn)", "gate_up.rows(ffn, 2 * ffn - 1)")
    assert refused(source, UnsupportedModelError) == (
        "The weight layers.0.gate_up needs [84, 48] of the tensor model.layers.0.mlp.gate_up_proj.weight, but its "
        "source has [83, 48]; mend the architecture's file."
    )


def test_an_architecture_that_leaves_rows_out(planted: Callable[[str, str, str], Path]) -> None:
    source = planted("toy_partly", "gate_up.rows(0, ffn)", "gate_up.rows(ffn, 2 * ffn)")
    assert refused(source) == (
        "Rows 84 to 167 of the tensor model.layers.0.mlp.gate_up_proj.weight in model.safetensors belong to both "
        "layers.0.gate_up and layers.0.gate_up; the architecture's file must say so (shared)."
    )
