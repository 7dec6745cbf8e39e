"""ONNX models on onnxruntime's CPU provider against the oracle, which computes with the same codes and scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import Flavour, export
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from tests import make_golden
from tests.helpers import golden_cases
from tests.helpers.onnx_models import Slots, cpu_session, difference, expected, expected_in_f16
from tests.helpers.sessions import TINY, WINDOWED, tokens, write_model

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")

F32, F16 = 1e-5, 5e-3
"""Of the largest logit."""
F16_MORE = 2.5
"""Times what rounding the result of each operation costs alone: the attention of some of these random models is so
sharp that this is 2e-3 to 5e-3 already; norms, cosines and what happens within operators come on top."""
STORED = [("q4", 32, "tile16"), ("int8", 128, "tile16"), ("q4", 64, "tile16"), ("f16", 32, "tile16"),
          ("q4", 128, "neuron"), ("int8", 32, "tile16"), ("f32", 32, "tile16"), ("int8", 64, "neuron"),
          ("q4", 32, "neuron")]
NAMES = [name for name in golden_cases.names() if make_golden.CASES[name]["model_type"] in make_golden.FIRST
         and name != "llama-dynamic"]
CASES = [(name, *STORED[(i + more) % len(STORED)]) for i, name in enumerate(NAMES) for more in (0, 4)]
REAL_MODELS = ("stories260K-hf", "babyllama-tok361-hf", "fables-5m-relu", "fables-5m-silu", "fables-draft")


def exported(bundle: Path, dtype: str = "f32", **options: Any) -> tuple[Bundle, Slots]:
    """An exported bundle with four slots."""
    opened = Bundle.open(bundle)
    flavour = Flavour(dtype=dtype, **options).checked(opened.config)
    export(opened, bundle / f"{dtype}.onnx", flavour)
    return opened, Slots(bundle / f"{dtype}.onnx", flavour, 4)


def test_every_storage_form_is_tried() -> None:
    assert {case[1:] for case in CASES} == set(STORED)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("name", "weights", "group_size", "layout"), CASES)
def test_the_oracles_logits(name: str, weights: str, group_size: int, layout: str, tmp_path: Path) -> None:
    """All positions of the context, in chunks of 64, 7 and 1."""
    case = golden_cases.load(name)
    convert(golden_cases.write_checkpoint(case, tmp_path / "c"), tmp_path / "b", weights=weights,
            group_size=group_size, ffn_layout=layout)
    ids = tokens(64, 3, case.config["vocab_size"])
    bundle = Bundle.open(tmp_path / "b")
    want = expected(bundle, ids)
    rounding = difference(expected_in_f16(bundle, ids), want)
    for dtype, tolerance in (("f32", F32), ("f16", max(F16, F16_MORE * rounding))):
        _, model = exported(tmp_path / "b", dtype)
        for size in (64, 7, 1):
            found = difference(model.chunks(ids, size), want)
            print(f"{dtype} in chunks of {size}: {found:.1e}, rounding alone {rounding:.1e}")
            assert found < tolerance, (dtype, size)
        onnx.checker.check_model(str(tmp_path / "b" / f"{dtype}.onnx"), full_check=False)


@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["llama", "mistral with windows"])
def test_slots_of_any_length_decode_together(config: Any, tmp_path: Path) -> None:
    """Ragged decodes in any order of slots, and a slot that is used again after what another text left there."""
    bundle, model = exported(write_model(tmp_path, config), ctx=96)
    texts = {slot: tokens(length, slot) for slot, length in enumerate((5, 61, 17, 1))}
    for slot, ids in texts.items():
        model.chunks(ids, 40, slot)
    for step, order in enumerate(([0, 1, 2, 3], [2, 0], [3, 1, 0], [1])):
        new = tokens(len(order), 50 + step)
        rows = model.feed([[token] for token in new], order)[0]
        for slot, token, row in zip(order, new, rows, strict=True):
            texts[slot].append(token)
            assert difference(row, expected(bundle, texts[slot])[-1]) < F32
    again = tokens(30, 9)
    assert difference(model.chunks(again, 11, 1), expected(bundle, again)) < F32


def test_the_largest_logits_with_their_ids(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    bundle, model = exported(path, ctx=32, top_k=5)
    ids = tokens(12)
    whole, values, chosen = model.feed([ids])
    logits = expected(bundle, ids)
    assert np.array_equal(np.take_along_axis(whole, chosen, 1), values), "the same bits"
    assert np.array_equal(chosen, np.argsort(-logits, axis=1)[:, :5])
    assert difference(values, -np.sort(-logits, axis=1)[:, :5]) < F32
    next(iter(model._past.values()))[..., 3, :] = np.nan
    assert np.isnan(model.feed([[7]])[1]).all(), "a row that is not finite says so"


@pytest.mark.parametrize(("vocabulary", "top"), [(99, 5), (997, 64), (997, 1), (1024, 64), (5000, 32), (130, 64)])
def test_the_largest_of_blocks_are_those_of_the_row(vocabulary: int, top: int, tmp_path: Path) -> None:
    """With equal logits, too, of which the lower id comes first; and infinite ones that are not finite say so."""
    bundle, _ = exported(write_model(tmp_path, replace(TINY, vocab_size=vocabulary)), ctx=32, top_k=top)
    whole = onnx.load(str(bundle.path / "f32.onnx"))
    nodes = [node for node in whole.graph.node if node.op_type == "Cast" and node.output[0] == "logits"]
    start = [node.op_type for node in whole.graph.node].index("Cast", list(whole.graph.node).index(nodes[0])) + 1
    constants = [tensor for tensor in whole.graph.initializer if not tensor.external_data]
    row = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ("rows", vocabulary))
    outputs = [value for value in whole.graph.output if value.name.startswith("top")]
    part = onnx.helper.make_graph(list(whole.graph.node)[start:], "sample", [row], outputs, constants)
    model = onnx.helper.make_model(part, opset_imports=whole.opset_import, ir_version=whole.ir_version)
    onnx.save(model, str(tmp_path / "sample.onnx"))
    rng = np.random.default_rng(vocabulary)
    rows = np.round(rng.normal(0, 3, (5, vocabulary)), 1).astype(np.float32)
    rows[3] = 1.0
    rows[4, vocabulary // 2] = np.inf
    values, ids = cpu_session(tmp_path / "sample.onnx").run(None, {"logits": rows})
    assert np.array_equal(ids[:4], np.argsort(-rows[:4], axis=1, kind="stable")[:, :top])
    assert np.array_equal(values[:4], np.take_along_axis(rows[:4], ids[:4], 1)) and np.isnan(values[4]).all()
    assert sum(node.op_type == "TopK" for node in part.node) == 1 + (vocabulary != 130)


def test_a_tied_head_is_one_initializer(tmp_path: Path) -> None:
    for weights in ("q4", "f16"):
        case = golden_cases.load("qwen2-tied")
        convert(golden_cases.write_checkpoint(case, tmp_path / weights), tmp_path / f"b-{weights}", weights=weights)
        exported(tmp_path / f"b-{weights}")
        names = [tensor.name for tensor in onnx.load(str(tmp_path / f"b-{weights}" / "f32.onnx")).graph.initializer]
        assert not [name for name in names if "head" in name]
        assert [name for name in names if "embed" in name] == (
            ["embed.codes", "embed.scales"] if weights == "q4" else ["embed"])


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_choose_the_golden_tokens(
    name: str, shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """Teacher-forced: golden.json's greedy token comes first wherever the two best differ by 0.05."""
    folder = shared_data(f"models/{name}")
    own = folder / "golden.json"
    golden = json.loads(own.read_text() if own.exists() else shared_data("models/golden.json").read_text())
    convert(folder, tmp_path / "b", weights="f16")
    _, model = exported(tmp_path / "b", ctx=256)
    sure = 0
    cases = (golden if own.exists() else golden[name])["cases"][:3]
    for case in cases:
        prompt, greedy = case["prompt_ids"], case["greedy_ids"]
        logits = model.chunks(prompt + greedy[:-1], 32)[len(prompt) - 1 :]
        second, first = np.partition(logits, -2)[:, -2:].T
        clear = first - second > 0.05
        assert np.array_equal(logits.argmax(-1)[clear], np.array(greedy)[clear])
        sure += int(clear.sum())
    assert sure > 0.9 * sum(len(case["greedy_ids"]) for case in cases)


@pytest.mark.parametrize("name", ["phi3", "mistral3-wrapped", "qwen3-vl-wrapped"])
def test_architectures_that_only_name_things_otherwise(name: str, tmp_path: Path) -> None:
    case = golden_cases.load(name)
    convert(golden_cases.write_checkpoint(case, tmp_path / "c"), tmp_path / "b", weights="f32")
    _, model = exported(tmp_path / "b")
    assert difference(model.chunks(case.ids, 7), case.logits) < F32
