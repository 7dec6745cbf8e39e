"""Calibrated rounding of experts: divergence of a mixture of experts, and the output error of each on another text.

    python benchmarks/calibrated_experts.py MODEL_DIR --calibrate FILE --text FILE [--experts 16] [--tokens 16384]

The model is a mixture that is made of a dense Llama: each expert has a random quarter of the neurons of its layer's
FFN, a router of random rows of unlike length chooses four for a token, and what they give is multiplied so that it is
the FFN's on average. So the inputs are those of a real model, and experts see unlike numbers of tokens. The mixture is
converted to q4 plainly and by GPTQ and compared with its own float32. An expert's error is the squared error of what
its matrices give for the tokens of the second text that chose it. The exit code is 1 if the divergence is not lower, or
the error of one expert more than 5 % higher.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import measured, row, table
from benchmarks.quality import measure
from edgeinfer.bundle import Bundle
from edgeinfer.calibration import inputs
from edgeinfer.converters import convert
from edgeinfer.models.calibrated import by_text, calibration_text, kept_statistics
from edgeinfer.quant import InputStatistics, layouts

ACTIVE = 4
"""Experts of a token; each has this share of an FFN's neurons."""
WORST = 1.05
Arrays = dict[str, NDArray[np.float32]]
HEADINGS = "tokens | KLD plain | KLD calibrated | error of all | of an expert at worst | fewest tokens of one"


def make_mixture(source: Path, path: Path, experts: int) -> None:
    """Write a checkpoint of a mixture that is made of a dense one."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    width, random = config["intermediate_size"] // ACTIVE, np.random.default_rng(0)
    stored = load_file(path / "model.safetensors")
    tensors: Arrays = {name: values.astype(np.float32) for name, values in stored.items()}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        gate, up, down = (tensors.pop(f"{layer}.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        norm = tensors[f"{layer}.post_attention_layernorm.weight"]
        rows = random.standard_normal((experts, gate.shape[1])) / np.sqrt(np.square(norm).sum())
        own: Arrays = {"gate": np.asarray(rows * random.uniform(0.5, 2, (experts, 1)), np.float32)}
        for expert in range(experts):
            some = np.sort(random.choice(len(gate), width, replace=False))
            own |= {f"experts.{expert}.w1": gate[some], f"experts.{expert}.w3": up[some],
                    f"experts.{expert}.w2": ACTIVE * down[:, some]}
        tensors |= {f"{layer}.block_sparse_moe.{name}.weight": np.ascontiguousarray(values)
                    for name, values in own.items()}
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": width,
               "num_local_experts": experts, "num_experts_per_tok": ACTIVE, "sliding_window": None}
    for name in ("config.json", "model.safetensors"):
        (path / name).unlink()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def expert_errors(reference: Path, made: Path, known: dict[str, Sequence[InputStatistics]]) -> Iterator[float]:
    """Yield the output error of each expert's matrices."""
    with Bundle.open(reference) as floats, Bundle.open(made) as rounded:
        for name, pieces in known.items():
            values = [layouts.unpack_tile16(np.concatenate(list(bundle.stored(name))), entry.type.dtype,
                                            entry.type.group_size, entry.shape, entry.type.levels)
                      for bundle in (floats, rounded) for entry in [bundle.tensors[name]]]
            off = np.split(values[0] - values[1], len(pieces))
            yield from (one.error_of(difference) for one, difference in zip(pieces, off, strict=True))


def main() -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="of the calibration text")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of the text that is measured")
    parser.add_argument("--weights", default="q4")
    given = parser.parse_args()
    found, good = list[str](), True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "mixture"
        make_mixture(given.model, source, given.experts)
        convert(source, folder / "f32", weights="f32")
        convert(source, folder / "plain", weights=given.weights)
        prior, inputs.PRIOR = inputs.PRIOR, int(1e30)  # the second text's errors are of each expert's own tokens
        kept = kept_statistics(source, calibration_text(source, given.text, 2 * 16384).stream, lambda *_: None)
        inputs.PRIOR = prior
        known = {name: pieces for name in kept.names if (pieces := kept.of(name)) and len(pieces) > 1}
        plain = np.array(list(expert_errors(folder / "f32", folder / "plain", known)))
        text = given.text.read_text()
        before = measure(folder / "plain", "f32", folder / "f32", text, max_tokens=given.max_tokens).divergence
        for tokens in given.tokens:
            stream = calibration_text(source, given.calibrate, tokens).stream
            convert(source, folder / "gptq", weights=given.weights, overwrite=True,
                    calibration=by_text(source, stream, lambda *_: None))
            counts = kept_statistics(source, stream, lambda *_: None)
            fewest = min(one for name in known for one in counts.of(name).tokens)  # type: ignore[union-attr]
            errors = np.array(list(expert_errors(folder / "f32", folder / "gptq", known)))
            after = measure(folder / "gptq", "f32", folder / "f32", text, max_tokens=given.max_tokens).divergence
            assert before and after
            worst = float((errors / plain).max())
            good = good and after.kld_mean < before.kld_mean and worst <= WORST
            found.append(row(f"{tokens}", f"{before.kld_mean:.5f}", f"{after.kld_mean:.5f}",
                             f"{errors.sum() / plain.sum():.2f}", f"{worst:.2f}", f"{fewest}"))
            print(found[-1], file=sys.stderr, flush=True)
    print(measured(f"{given.model.name} as a mixture of {given.experts} experts, {given.weights}"))
    print(table(HEADINGS, found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
