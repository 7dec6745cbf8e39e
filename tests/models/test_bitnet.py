"""BitNet b1.58 2B4T against transformers: its packed checkpoints of both classes, and the floats of training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeinfer.converters import convert
from tests.helpers.packers import Raw, f32, write_raw
from tests.helpers.sessions import scored, session
from tests.make_golden import CASES, token_ids, transformers_model

CONFIG = {**CASES["bitnet"], "hidden_size": 80, "num_attention_heads": 4, "intermediate_size": 212}
IDS = token_ids("bitnet", 99, 40)
NEAR = 0.03
"""Of the largest logit: activations are quantised in groups here, by token there."""


def of_transformers(kind: str, online: bool, monkeypatch: pytest.MonkeyPatch, exact: bool) -> tuple[
        np.ndarray, dict[str, Raw]]:
    """Logits, and the tensors of the checkpoint; if `exact`, with activations that are not quantised."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    bitnet = pytest.importorskip("transformers.integrations.bitnet", reason="transformers is not installed")
    if exact:
        monkeypatch.setattr(bitnet, "ActQuant", SimpleNamespace(apply=lambda x: x))
    model, tensors = transformers_model("bitnet", CONFIG)
    how = SimpleNamespace(linear_class=kind, quantization_mode="online" if online else "offline", use_rms_norm=False,
                          rms_norm_eps=1e-5)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
        bitnet.replace_with_bitnet_linear(model, ["lm_head"], how)
        model.to_empty(device="cpu")
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        state, raw = dict[str, object](), dict[str, Raw]()
        for name, values in tensors.items():
            values, module = values.astype(np.float32), name.removesuffix(".weight")
            state[name], raw[name] = torch.from_numpy(values), f32(values)
            if module not in linear or online:
                continue
            scale = np.abs(values).mean(dtype=np.float64).astype(np.float16).astype(np.float32)
            codes = np.clip(np.rint(values / scale), -1, 1)
            packed = bitnet.pack_weights(torch.from_numpy(codes).to(torch.int8))
            factor = scale if kind == "autobitlinear" else 1 / scale
            state[name] = packed if kind == "bitlinear" else torch.from_numpy(codes)
            state[module + ".weight_scale"] = torch.tensor([factor])
            raw[name] = ("U8", tuple(packed.shape), packed.numpy().tobytes())
            raw[module + ".weight_scale"] = f32(np.array([factor]))
        assert not any(model.load_state_dict(state, strict=True))
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy(), raw


def ours(folder: Path, kind: str, online: bool, raw: dict[str, Raw], weights: str | None) -> np.ndarray:
    """Logits of a checkpoint of these tensors."""
    section = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "online" if online else "offline",
               "modules_to_not_convert": None}
    (folder / "hf").mkdir()
    write_raw(folder / "hf" / "model.safetensors", raw)
    own = {"auto_map": {"AutoConfig": "configuration_bitnet.BitNetConfig"}, "architectures": ["BitNetForCausalLM"]}
    (folder / "hf" / "config.json").write_text(json.dumps({**CONFIG, **own, "quantization_config": section}))
    report = convert(folder / "hf", folder / "out", weights=weights)
    assert {one.dtype for one in report.tensors} == ({"q2", "f32"} if weights is None else {"f32"})
    with session(folder / "out", kv="f32", ctx=64, outputs=16) as opened:
        return scored(opened, IDS).copy()


@pytest.mark.reference
@pytest.mark.parametrize(("kind", "online"), [("autobitlinear", False), ("autobitlinear", True), ("bitlinear", False)])
def test_logits_are_those_of_transformers(kind: str, online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    """In floats exactly; as codes of 2 bits, which multiply activations of 8 bits, nearly."""
    for exact in ((True, False) if kind == "autobitlinear" else (False,)):  # the other class always quantises
        folder = tmp_path / str(exact)
        folder.mkdir()
        with monkeypatch.context() as patch:
            want, raw = of_transformers(kind, online, patch, exact)
        found = ours(folder, kind, online, raw, "f32" if exact else None)
        assert np.abs(found - want).max() < (1e-5 if exact else NEAR) * np.abs(want).max()
