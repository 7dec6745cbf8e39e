"""Divergence from float32 of types and ways of rounding the layers' matrices, on a text that was not calibrated on.

    python benchmarks/calibrated.py MODEL_DIR --calibrate FILE --text FILE [--types q4,tableq] [--ways plain,gptq]
    python benchmarks/calibrated.py MODEL_DIR --calibrate FILE --text FILE --curve [--types q4,tableq]
    python benchmarks/calibrated.py MODEL_DIR --calibrate FILE --text FILE --ggml TOOLS --gguf MODEL-F32.gguf

The model's own program runs the calibration text in float32 and gives the second moments of each matrix's inputs. Then
`quant.rounding.quantise_matrix` rounds the matrices of the layers to each type: `plain` without statistics,
`importance` with mean squares, `gptq` with all moments; embedding and head stay float32, as does KV. A line of the
table has bits of a weight, KL divergence, and the output error of all matrices beside that of plain rounding.

With `--curve` whole models are converted as `edgeinfer convert` does, embedding and head included: in each type alone
(of embedding and head `--ends`, if that is given), and with `--size` for the bytes of that. The exit code is 1 if a
type alone is better.

With `--ggml` the folder's llama-imatrix runs the calibration text and its llama-quantize makes Q4_K and IQ3_S of the
layers' matrices; what they decode to is measured beside types by size in no more bytes. The GGUF file is what
llama.cpp's converter makes of the model in F32. The exit code is 1 if ours lose more than 0.65 of Q4_K or 0.8 of IQ3_S.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import measured, row, table
from benchmarks.quality import measure
from edgeinfer.bundle import Bundle, BundleWriter
from edgeinfer.calibration.effects import measure_effects
from edgeinfer.calibration.hooks import open_plain
from edgeinfer.calibration.statistics import Covariance, capture
from edgeinfer.converters import BitBudget, ConversionReport, bit_budget, convert
from edgeinfer.converters.bit_budget import CANDIDATES
from edgeinfer.converters.knapsack import choose
from edgeinfer.converters.packing import WeightReader
from edgeinfer.graph import Weight
from edgeinfer.models.calibrated import by_text, calibration_text
from edgeinfer.quant import TYPES, InputStatistics, WeightType, layouts, packed, rounding
from edgeinfer.text import Tokenizer

WINDOW, PIECE = 512, 6000
"""Tokens of a window of the calibration text, and the characters that they are taken from."""
Statistics = dict[str, InputStatistics]
OWN_FILES = ("bundle.json", "weights.bin")
CURVE = "type | bits | KLD alone | KLD by size | ratio | expected | gap | size met"
GGML = "ggml's type | bits | KLD | bits by size | KLD by size | ratio | at most"
HEADINGS = "type | rounding | bits | KLD | 99 % | same top | output error / plain | s"


class Made(NamedTuple):
    """A bundle whose layers were rounded."""

    bits: float
    output_error: float
    output_error_plain: float


def statistics_of(bundle: Path, text: str, tokens: int) -> Statistics:
    """Moments of the inputs of all matrices of layers, over windows that are spread over the text."""
    session = open_plain(bundle, WINDOW, chunk=WINDOW, kv="f32")
    tokenizer, windows = Tokenizer.open(bundle), tokens // WINDOW
    ids: list[int] = []
    for start in np.linspace(0, max(0, len(text) - PIECE), windows, dtype=int):
        ids += tokenizer.encode(text[start : start + PIECE])[:WINDOW]
    found = {op: Covariance(op.x) for op in session.graph.ops  # type: ignore[attr-defined]
             if getattr(getattr(op, "weight", None), "kind", "") == "matrix"}
    capture(session, ids, {op: [moments] for op, moments in found.items()})
    session.close()
    made: Statistics = {}
    for op, moments in found.items():
        mean = moments.mean
        made[op.weight.name] = InputStatistics(moments.tokens, np.diagonal(mean).copy(), None, mean)  # type: ignore[attr-defined]
    return made


def write(source: Path, destination: Path, type_of: WeightType | dict[str, WeightType],
          known: Callable[[str], InputStatistics | None]) -> Made:
    """Copy a bundle in float32 with the matrices of its layers rounded, to one type or each to its own."""
    nbytes, weights, errors, plain = 0, 0, 0.0, 0.0
    with Bundle.open(source) as bundle, \
            BundleWriter(destination, bundle.config, bundle.quantisation, overwrite=True) as writer:
        for file in sorted(source.iterdir()):
            if file.name not in OWN_FILES:
                writer.copy_file(file)
        for name, entry in bundle.tensors.items():
            data = np.concatenate(list(bundle.stored(name)))
            if entry.type.layout != "tile16" or not name.startswith("layers."):
                writer.add(name, entry.type, entry.shape, data)
                continue
            values = layouts.unpack_tile16(data, "f32", 0, (entry.shape[0], entry.shape[1]))
            stored = type_of if isinstance(type_of, WeightType) else type_of[name]
            found = rounding.quantise_matrix(values, stored, name, known(name))
            content = packed.pack(found.codes, found.stored, found.factors) if not stored.storage.simple else \
                layouts.pack_tile16(found.codes, stored.dtype, stored.group_size, found.factors.scales)
            writer.add(name, found.stored, entry.shape, content)
            nbytes, weights = nbytes + len(content), weights + values.size
            errors, plain = errors + found.errors.output_error, plain + found.errors.output_error_plain
    return Made(8 * nbytes / weights, errors, plain)


def rows(folder: Path, known: Statistics, types: list[WeightType], ways: list[str], text: str,
         max_tokens: int | None) -> list[str]:
    """Make and measure all combinations."""
    found: list[str] = []
    reference = folder / "f32"
    given: dict[str, Callable[[str], InputStatistics | None]] = {
        "plain": lambda name: None,
        "importance": lambda name: InputStatistics(known[name].tokens, known[name].mean_square),
        "gptq": lambda name: known[name],
    }
    for stored in types:
        for way in ways:
            began = time.perf_counter()
            made = write(reference, folder / "rounded", stored, given[way])
            took = time.perf_counter() - began
            divergence = measure(folder / "rounded", "f32", reference, text, max_tokens=max_tokens).divergence
            assert divergence is not None
            share = f"{made.output_error / made.output_error_plain:.3f}" if made.output_error_plain else ""
            found.append(row(str(stored), way, f"{made.bits:.3f}", f"{divergence.kld_mean:.5f}",
                             f"{divergence.kld_p99:.4f}", f"{divergence.same_top:.1%}", share, f"{took:.1f}"))
            print(found[-1], file=sys.stderr, flush=True)
    return found


class Choices(NamedTuple):
    """The types that each matrix of a layer can have, with bytes and expected effects."""

    names: list[str]
    types: list[WeightType]
    options: list[list[tuple[int, float]]]
    weights: int


def choices(reference: Path, known: Statistics, text: str) -> Choices:
    """Round each matrix of a layer to all types, and measure the effect of its error on predictions."""
    session = open_plain(reference, WINDOW, chunk=256, kv="f32", outputs=256)
    effects = measure_effects(session, Tokenizer.open(reference).encode(text[: 8 * PIECE]))
    session.close()
    types, options, weights = [WeightType.of(*one) for one in CANDIDATES], [], 0
    with Bundle.open(reference) as bundle:
        for name, one in known.items():
            shape = bundle.tensors[name].shape[:2]
            values = layouts.unpack_tile16(np.concatenate(list(bundle.stored(name))), "f32", 0, shape)  # type: ignore[arg-type]
            weights += values.size
            share = effects[name].output / one.error_of(values)
            errors = [rounding.quantise_matrix(values, stored, name, one).errors for stored in types]
            options.append([(stored.nbytes(shape), share * error.output_error)
                            for stored, error in zip(types, errors, strict=True)])
    return Choices(list(known), types, options, weights)


def chosen(possible: Choices, bits: float) -> dict[str, WeightType]:
    """Choose a type for each matrix of a layer, as `--bits` does for all matrices."""
    choice = choose(possible.options, int(bits * possible.weights / 8))
    return {name: possible.types[i] for name, i in zip(possible.names, choice.options, strict=True)}


def against_ggml(folder: Path, known: Statistics, given: argparse.Namespace, text: str) -> tuple[list[str], bool]:
    """Measure files of llama.cpp's quantiser, with an importance matrix, beside types by size; False if these lose."""
    def run(tool: str, *arguments: object) -> None:
        subprocess.run([given.ggml / tool, *map(str, arguments)], check=True, capture_output=True)

    found, good, reference = list[str](), True, folder / "f32"
    matrix = folder / "imatrix.gguf"
    run("llama-imatrix", "-m", given.gguf, "-f", given.calibrate, "-o", matrix, "-c", WINDOW, "--no-ppl",
        "--chunks", given.tokens // WINDOW, "-t", 1)
    possible = choices(reference, known, given.calibrate.read_text())
    for kind, bits, most in (("Q4_K_S", 4.5, 0.65), ("IQ3_S", 3.4375, 0.8)):
        coded, plain = folder / "coded.gguf", folder / "plain.gguf"
        run("llama-quantize", "--imatrix", matrix, "--pure", "--token-embedding-type", "f32", given.gguf, coded, kind)
        run("llama-quantize", "--allow-requantize", coded, plain, "F32")
        convert(plain, folder / "ggml", weights="f32", overwrite=True)
        made = write(reference, folder / "rounded", chosen(possible, bits),
                     lambda name: known[name])
        both = [measure(folder / name, "f32", reference, text, max_tokens=given.max_tokens).divergence
                for name in ("ggml", "rounded")]
        assert both[0] and both[1] and made.bits <= bits
        ratio = both[1].kld_mean / both[0].kld_mean
        good = good and ratio <= most
        found.append(row(f"{kind}, importance matrix", f"{bits:g}", f"{both[0].kld_mean:.5f}", f"{made.bits:.3f}",
                         f"{both[1].kld_mean:.5f}", f"{ratio:.2f}", f"{most:g}"))
        print(found[-1], file=sys.stderr, flush=True)
    return found, good


def divergence_of(bundle: Path, reference: Path, text: str, max_tokens: int | None) -> float:
    """Return the mean divergence of a bundle's predictions from those of another one."""
    found = measure(bundle, "f32", reference, text, max_tokens=max_tokens).divergence
    assert found is not None
    return found.kld_mean


def curve(folder: Path, given: argparse.Namespace, types: list[WeightType], text: str) -> tuple[list[str], bool]:
    """Convert to each type and, with types by budget, to the size of that; False if a type alone was better."""
    stream, found, best = calibration_text(given.model, given.calibrate, given.tokens).stream, list[str](), True
    quiet = by_text(given.model, stream, lambda *_: None, effects=True)
    options, by_size = dict[str, list[bit_budget.Option]](), dict[int, tuple[ConversionReport, float]]()
    measured_anew = bit_budget._measured

    def measured_once(reading: WeightReader, weight: Weight, *more: Any) -> list[bit_budget.Option]:
        if weight.name not in options:  # the same for all sizes
            options[weight.name] = list(measured_anew(reading, weight, *more))
        return options[weight.name]

    bit_budget._measured = measured_once  # type: ignore[assignment]
    for stored in types:
        name = stored.dtype
        alone = convert(given.model, folder / "alone", weights=name, group_size=stored.group_size if len(
            stored.storage.groups) > 1 else None, embedding=given.ends or name, head=given.ends or name,
            calibration=quiet, overwrite=True)
        size = (folder / "alone" / "weights.bin").stat().st_size
        if size not in by_size:
            made = convert(given.model, folder / "mixed", chooser=BitBudget(size=size), calibration=quiet,
                           overwrite=True)
            by_size[size] = made, divergence_of(folder / "mixed", folder / "f32", text, given.max_tokens)
        (mixed, kld), kld_alone = by_size[size], divergence_of(folder / "alone", folder / "f32", text, given.max_tokens)
        assert mixed.chosen and mixed.chosen.gap is not None and mixed.bundle_bytes <= size
        best = best and kld <= kld_alone  # the same where no types are smaller
        found.append(row(str(stored), f"{alone.bits:.3f}", f"{kld_alone:.5f}", f"{kld:.5f}", f"{kld / kld_alone:.2f}",
                         f"{mixed.chosen.cost:.5f}", f"{mixed.chosen.gap:.1%}", f"{mixed.bundle_bytes / size:.2%}"))
        print(found[-1], file=sys.stderr, flush=True)
    return found, best


def main() -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", default="q4,tableq,tableq3")
    parser.add_argument("--ways", default="plain,importance,gptq")
    parser.add_argument("--tokens", type=int, default=200_000, help="of the calibration text")
    parser.add_argument("--max-tokens", type=int, help="of the text that is measured")
    parser.add_argument("--curve", action="store_true", help="whole models, beside types by budget")
    parser.add_argument("--ends", help="type of embedding and head beside these, such as int8, the default of convert")
    parser.add_argument("--ggml", type=Path, help="folder of llama-imatrix and llama-quantize")
    parser.add_argument("--gguf", type=Path, help="the model in F32, for these")
    given = parser.parse_args()
    types = [_type_of(name) for name in given.types.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        convert(given.model, folder / "f32", weights="f32", embedding="f32", head="f32")
        text, best = given.text.read_text(), True
        if given.curve:
            found, best = curve(folder, given, types, text)
        elif given.ggml:
            known = statistics_of(folder / "f32", given.calibrate.read_text(), given.tokens)
            found, best = against_ggml(folder, known, given, text)
        else:
            known = statistics_of(folder / "f32", given.calibrate.read_text(), given.tokens)
            found = rows(folder, known, types, given.ways.split(","), text, given.max_tokens)
    print(measured(given.model.name))
    print(table(CURVE if given.curve else GGML if given.ggml else HEADINGS, found))
    return 0 if best else 1


def _type_of(name: str) -> WeightType:
    """Return the type of a name with its group size, as in q4g128; without one it is 32, where there are several."""
    kind, _, group = name.partition("g") if name not in TYPES else (name, "", "")
    return WeightType.of(kind, int(group or 32))


if __name__ == "__main__":
    sys.exit(main())
