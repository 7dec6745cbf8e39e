"""The smallest types that lose no more than llama.cpp's Q4_K_M, for a comparison of speeds at equal quality.

    python benchmarks/equal_quality.py MODEL_DIR --gguf MODEL-F32.gguf --ggml TOOLS --calibrate FILE --text FILE \
        --mixture MIXTURE.json
    python benchmarks/against_llama_bench.py --program TOOLS/llama-bench --name llama.cpp --python PEER_PYTHON \
        --models MODELS --shape tinyllama-1.1b --kind q4_k_m --mixture MIXTURE.json

The first command makes Q4_K_M with an importance matrix of the calibration text by the folder's llama-imatrix and
llama-quantize (embedding and head stay F32), and measures what it decodes to. Then it looks for the fewest bits at
which types by size (`convert --bits`), rounded by GPTQ over the same text, diverge no more, and writes the type of each
matrix. The second gives a shape with random weights these types by kind of matrix and by depth, its head the bits of
Q4_K_M's, and times it against a Q4_K_M file of the same shape.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.calibrated import WINDOW, choices, chosen, statistics_of, write
from benchmarks.harness import measured, row, table
from benchmarks.quality import measure
from edgeinfer.converters import convert

STEP = 1 / 16
"""Bits between two sizes that are tried."""
HEADINGS = "layers' matrices | bits | KLD | 99 %"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--gguf", type=Path, required=True, help="the model in F32, as llama.cpp's converter makes it")
    add("--ggml", type=Path, required=True, help="folder of llama-imatrix and llama-quantize")
    add("--calibrate", type=Path, required=True)
    add("--text", type=Path, required=True)
    add("--mixture", type=Path, required=True, help="file to write")
    add("--kind", default="Q4_K_M", help="llama.cpp's mixture (default Q4_K_M)")
    add("--tokens", type=int, default=200_000, help="of the calibration text")
    add("--max-tokens", type=int, help="of the text that is measured")
    add("--low", type=float, default=3.25, help="fewest bits (default 3.25)")
    add("--high", type=float, default=4.75, help="most bits (default 4.75)")
    return parser.parse_args()


def by_ggml(folder: Path, given: argparse.Namespace) -> Path:
    """Make a file of llama.cpp's mixed types and import its decoded weights."""
    def run(tool: str, *arguments: object) -> None:
        subprocess.run([given.ggml / tool, *map(str, arguments)], check=True, capture_output=True)

    matrix, coded, plain = (folder / name for name in ("imatrix.gguf", "coded.gguf", "plain.gguf"))
    run("llama-imatrix", "-m", given.gguf, "-f", given.calibrate, "-o", matrix, "-c", WINDOW, "--no-ppl", "--chunks",
        given.tokens // WINDOW, "-t", 1)
    run("llama-quantize", "--imatrix", matrix, "--token-embedding-type", "f32", "--output-tensor-type", "f32",
        given.gguf, coded, given.kind)
    run("llama-quantize", "--allow-requantize", coded, plain, "F32")
    convert(plain, folder / "ggml", weights="f32")
    return coded


def main() -> int:
    """Find the mixture, write it and print both; the exit code is 1 if none within the bits loses so little."""
    given = parse()
    text, calibration = given.text.read_text(), given.calibrate.read_text()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        reference = folder / "f32"
        convert(given.model, reference, weights="f32", embedding="f32", head="f32")
        coded = by_ggml(folder, given)

        def kld(name: str) -> tuple[float, float]:
            found = measure(folder / name, "f32", reference, text, max_tokens=given.max_tokens).divergence
            assert found is not None
            return found.kld_mean, found.kld_p99

        peer = kld("ggml")
        known = statistics_of(reference, calibration, given.tokens)
        possible = choices(reference, known, calibration)
        rows = [row(f"{given.kind}, importance matrix", bits_of(coded, possible.weights, given.gguf),
                    *(f"{value:.5f}" for value in peer))]
        low, high, best = 0, round((given.high - given.low) / STEP), None
        while low <= high:
            steps = (low + high) // 2
            types = chosen(possible, given.low + steps * STEP)
            made = write(reference, folder / "rounded", types, lambda name: known[name])
            found = kld("rounded")
            rows.append(row(f"at most {given.low + steps * STEP:g}", f"{made.bits:.3f}",
                            *(f"{value:.5f}" for value in found)))
            print(rows[-1], file=sys.stderr, flush=True)
            if found[0] <= peer[0]:
                best, high = (made.bits, found[0], types), steps - 1
            else:
                low = steps + 1
    print(measured(given.model.name))
    print(table(HEADINGS, rows))
    if best is None:
        return 1
    bits, divergence, types = best
    given.mixture.write_text(json.dumps({
        "model": given.model.name, "kind": given.kind, "peer_kld": peer[0], "kld": divergence, "bits": bits,
        "types": {name: [stored.dtype, stored.group_size] for name, stored in types.items()}}, indent=1) + "\n")
    return 0


def bits_of(coded: Path, weights: int, plain: Path) -> str:
    """Return the bits of a weight of llama.cpp's file, whose other tensors are F32 in both files."""
    saved = plain.stat().st_size - coded.stat().st_size
    return f"{32 - 8 * saved / weights:.3f}"


if __name__ == "__main__":
    sys.exit(main())
