"""Divergence that outliers of inputs cost, and what factors of channels and outlier columns save of it.

    python benchmarks/outlier_channels.py MODEL_DIR --calibrate FILE --text FILE

Outliers are made exactly: three channels of each norm in front of a layer's matrices are multiplied by 100, and the
columns behind them divided by 100, so that the model's function is the same. The layers' matrices are converted to int8
and q4 and compared with the model's own float32: embedding, head and KV stay float32. Ways of rounding are those of
`edgeinfer convert`: plain, and calibrated by mean squares or by GPTQ, without factors, with those of one formula, with
those of all, and with outlier columns (`--outliers auto`). Of the model as it is factors are taken wherever they lower
the expected error, not only where by 30 %. The exit code is 1 if a bound on the way with mean squares alone is missed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import measured, row, table
from benchmarks.quality import measure
from edgeinfer.converters import convert, scaling, with_outliers
from edgeinfer.models.calibrated import GPTQ, IMPORTANCE, by_text, calibration_text

TYPES = "int8", "q4"
FAR, CHANNELS = 100, 3
READERS = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
BOUNDS = {("int8", "AWQ, SmoothQuant"): 0.0002, ("q4", "AWQ, SmoothQuant"): 0.0067,
          ("int8", "outlier columns"): 0.0002, ("q4", "outlier columns"): 0.0060}
"""Most that the model with outliers may lose, calibrated by mean squares."""
HEADINGS = "model | rounding | factors | int8 | q4"
ALL = dict(scaling.FORMULAS)
WAYS: dict[str, tuple[str, ...]] = {"none": (), **{name: (name,) for name in ALL}, ", ".join(ALL): tuple(ALL),
                                    "outlier columns": ()}


def make_outliers(source: Path, path: Path) -> None:
    """Write a checkpoint of the same function, in float32, with outliers."""
    shutil.copytree(source, path)
    (path / "model.safetensors").chmod(0o644)
    tensors = {name: values.astype(np.float32) for name, values in load_file(source / "model.safetensors").items()}
    random = np.random.default_rng(0)
    for name, values in tensors.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in READERS:
            continue
        some = random.choice(len(values), CHANNELS, replace=False)
        values[some] *= FAR
        for module in ("self_attn", "mlp"):
            for reader in READERS[norm]:
                if (matrix := tensors.get(f"{layer}.{module}.{reader}.weight")) is not None:
                    matrix[:, some] /= FAR
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384, help="of the calibration text")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of the text that is measured")
    given = parser.parse_args()
    text, found, good = given.text.read_text(), list[str](), True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_outliers(given.model, folder / "outliers")
        make = partial(convert, embedding="f32", head="f32", overwrite=True)
        for name, source, worth in (("with outliers", folder / "outliers", scaling.WORTH),
                                    ("as it is", given.model, 1.0)):
            make(source, folder / "f32", weights="f32")
            stream, scaling.WORTH = calibration_text(source, given.calibrate, given.tokens).stream, worth

            def losses(way: str, method: str, source: Path = source, stream: object = stream) -> dict[str, float]:
                scaling.FORMULAS = {formula: ALL[formula] for formula in WAYS[way]}
                calibration = by_text(source, stream, lambda *_: None, method) if method else None  # type: ignore[arg-type]
                if way == "outlier columns":
                    calibration = with_outliers(calibration, "auto")
                klds = {}
                for kind in TYPES:
                    make(source, folder / "made", weights=kind, calibration=calibration)
                    divergence = measure(folder / "made", "f32", folder / "f32", text,
                                         max_tokens=given.max_tokens).divergence
                    assert divergence
                    klds[kind] = divergence.kld_mean
                return klds

            for way, method in [("none", ""), *((way, method) for method in (IMPORTANCE, GPTQ) for way in WAYS)]:
                klds = losses(way, method)
                if method == IMPORTANCE and name == "with outliers":
                    good = good and all(klds[kind] <= BOUNDS.get((kind, way), 1) for kind in TYPES)
                found.append(row(name, method or "plain", way, *(f"{klds[kind]:.5f}" for kind in TYPES)))
                print(found[-1], file=sys.stderr, flush=True)
    print(measured(given.model.name))
    print(table(HEADINGS, found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
