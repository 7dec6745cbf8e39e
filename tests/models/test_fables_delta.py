"""The scripts that train a small hybrid and round its state compute the gated delta rule as transformers does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from tests.helpers.checkpoints import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (find_spec("torch") and find_spec("transformers")),
                                                  reason="the extra 'reference' is not installed")]


def inputs(tokens: int) -> dict[str, Any]:
    """Two rows of so many tokens; six value heads share two key heads."""
    import torch

    torch.manual_seed(0)
    q, k = (torch.randn(2, tokens, 2, 10) for _ in range(2))
    g = -torch.rand(2, tokens, 6) * 3
    return {"query": q, "key": k, "value": torch.randn(2, tokens, 6, 20), "g": g, "beta": torch.rand(2, tokens, 6)}


@pytest.mark.parametrize("tokens", [1, 32, 75])
def test_chunks_give_what_single_tokens_give(tokens: int) -> None:
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    from benchmarks.train_fables_delta import delta_rule

    given, before = inputs(tokens), torch.randn(2, 6, 10, 20)
    more = {"initial_state": before, "output_final_state": True}
    found, state = delta_rule(**given, **more)
    wanted, last = torch_recurrent_gated_delta_rule(**given, **more, use_qk_l2norm_in_kernel=True)
    assert torch.allclose(found, wanted, atol=1e-5) and torch.allclose(state, last, atol=1e-5)


def test_a_state_in_fewer_bits_differs_by_their_rounding() -> None:
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    from benchmarks.state_types import EXACT, State, delta_rule

    given = inputs(75)
    wanted, _ = torch_recurrent_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    exact = delta_rule(EXACT, [])(**given)[0]
    assert torch.allclose(exact, wanted, atol=1e-5)
    errors = [float((delta_rule(State(dtype, every), [])(**given)[0] - exact).abs().max())
              for dtype, every in ((torch.float32, 1), (torch.float16, 16), (torch.float16, 1), (torch.bfloat16, 1))]
    assert 0 < errors[0] < 1e-6 < errors[1] < errors[2] < 1e-3
    assert 4 * errors[2] < errors[3] < 16 * errors[2]  # three bits fewer


def test_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps are the same at once or in two runs."""
    from safetensors.numpy import load_file

    from benchmarks import train_fables_delta as script

    monkeypatch.setattr(script, "TOKENS", 96)
    monkeypatch.setattr(script, "WINDOW", 24)
    like = make_checkpoint(tmp_path / "like", hidden_size=256, intermediate_size=768)
    (tmp_path / "story.txt").write_text("\f".join(["A hen ran.\n", "The fox sat down.", "A hen ran again."] * 9))
    arguments = ["--like", str(like), "--text", str(tmp_path / "story.txt"), "1", "--steps", "5"]
    for out, runs in (("once", [[]]), ("twice", [["--stop", "3"], ["--resume"]])):
        for more in runs:
            assert script.main([*arguments, "--out", str(tmp_path / out), *more]) == 0
    once, twice = (load_file(tmp_path / out / "model.safetensors") for out in ("once", "twice"))
    assert {name: values.tobytes() for name, values in once.items()} == {
        name: values.tobytes() for name, values in twice.items()}
    convert(tmp_path / "once", tmp_path / "bundle", weights="f16")
    with Bundle.open(tmp_path / "bundle") as bundle:
        recurrent = bundle.config.recurrent
    assert recurrent and recurrent.layers == (0, 1, 2)


def test_held_out_lines_are_not_trained_on() -> None:
    from benchmarks.train_fables_delta import documents

    text = "\n\nA hen ran.\n\nOnce upon a time a fox sat down.\n\nOnce upon a time it slept.\nIt woke."
    assert list(documents(text, set())) == ["A hen ran.", "Once upon a time a fox sat down.",
                                            "Once upon a time it slept.\nIt woke."]
    held_out = {"Once upon a time a fox sat down.", "It woke."}
    assert list(documents(text, held_out)) == ["A hen ran.", "Once upon a time it slept."]
    assert list(documents("One\fTwo\n\nThree", set())) == ["One", "Two\nThree"]
