"""The report of benchmarks/neuron_rows.py, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from statistics import median
from typing import NamedTuple

from benchmarks.peers.machine import describe
from edgeinfer import __version__
from edgeinfer.devices import DEFAULT_CURVES, DEFAULT_DENSE, GATES_SHARE, MASKED_SHARE


class Reading(NamedTuple):
    """One run of a program over all FFNs."""

    gbs: float
    """Useful bytes per second: weights of the neurons that count, with their scales."""
    bandwidth: float
    """GB/s of streaming reads right before and after it."""
    seconds: float


def ratios(names: dict[str, list[Reading]], first: str, second: str) -> list[float]:
    """Speed of one program over that of another, round by round."""
    return [a.gbs / b.gbs for a, b in zip(names[first], names[second], strict=True)]


def write_report(head: str, isa: str, results: dict[int, dict[str, list[Reading]]]) -> str:
    """The whole report; `head` says what was in memory, `results` holds readings by threads and name."""
    machine = ", ".join(describe().values())
    parts = [
        "# FFNs stored neuron by neuron", "",
        "Written by `python benchmarks/neuron_rows.py`. What the layout is: [bundle.md](bundle.md); how the kernels",
        "work: `kernels/ops/neuron_gated.py`.", "",
        f"Measured: {machine}; {isa}; edgeinfer {__version__}, numba {version('numba')}.", "",
        head, "",
    ]
    for threads, names in results.items():
        parts += [f"## {threads} thread{'s' if threads > 1 else ''}", "", *_tables(names), ""]
    return "\n".join([*parts, *EXPLANATION, "", *_defaults(), ""])


def _defaults() -> Iterator[str]:
    """The curves that devices without a measurement take."""
    yield "## What is taken where nothing was measured"
    yield ""
    yield "`edgeinfer devices --probe` measures these shares of the speed of tiles. Devices without them take what is"
    yield f"rounded from readings of the machine above with 2 threads, and {DEFAULT_DENSE:.2f} for all neurons:"
    yield ""
    yield "| neurons | chosen by a mask | alive, all gates read |"
    yield "|---:|---:|---:|"
    for size, masked in DEFAULT_CURVES[MASKED_SHARE].points:
        yield f"| {size / 1000:.0%} | {masked:.2f} | {DEFAULT_CURVES[GATES_SHARE].at(size):.2f} |"


def _tables(names: dict[str, list[Reading]]) -> Iterator[str]:
    against = ratios(names, "neuron", "tile16")
    yield f"Dense, neuron against tile16, round by round: **{median(against):.2f}** ({min(against):.2f} to " \
          f"{max(against):.2f})."
    yield ""
    yield "| program | ms | useful GB/s | share of streaming reads |"
    yield "|---|---:|---:|---:|"
    for name, readings in names.items():
        shares = [reading.gbs / reading.bandwidth for reading in readings]
        yield (f"| {_title(name)} | {1e3 * median(r.seconds for r in readings):.2f} "
               f"| {median(r.gbs for r in readings):.1f} "
               f"| {median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%}) |")
    reads = [reading.bandwidth for readings in names.values() for reading in readings]
    yield ""
    yield f"Streaming reads: {median(reads):.1f} GB/s ({min(reads):.1f} to {max(reads):.1f})."


def _title(name: str) -> str:
    kind, _, share = name.partition(" ")
    if kind == "mask":
        return f"{float(share):.0%} of the neurons, chosen at random by a mask"
    if kind == "live":
        return f"all gates, {float(share):.0%} of the neurons alive"
    return f"dense, {name}"


EXPLANATION = """
## What the rows mean

A reading is one token through all FFNs, as often as makes up half of all bytes, with other neurons each time; 1 GiB
is read as a stream before and after it. Each round takes one reading of every program; medians over the rounds.
*Useful* bytes are those of the neurons that are computed: all three parts of chosen neurons; where
all gates are computed, gate rows of all neurons, up rows and down columns of those that are alive. Time contains norm,
quantisation of x, wake-up of the threads and all barriers.

## Why it is built so

* A core has room for a few dozen outstanding lines, so rows of 2 KB that lie apart, fetched by instructions, come at
  about half the speed of a stream, which the prefetcher of the second cache reads ahead. A first version had one
  kernel for gate and up and one for down; each skipped the bytes of the other, and dense decoding reached 60 % of
  tile16.
* Now a token goes through blocks of neurons, from gate to column. All gates lie together, so those of a block come as
  one stream, fetched two rows ahead. Then its live neurons are known, and their pairs of up row and column come one
  batch of 8 ahead of use. Each block leaves its sum of columns; a second record adds these up in order, so the result
  does not depend on threads.
* Where a mask has chosen the neurons and most of them live, gates and pairs of the next 8 are fetched before it is
  known which of them live.
* Products of rows take four lines at a time, so that their 16 scales are widened once and stay in a register. What is
  left is computing: from the second cache a line of a row takes 1.8 times as long as a line of tiles, and one of a
  column, each code of which becomes a float, about five times. A trial version that computed next to nothing read at
  0.95 of tile16's speed.
* A line of a column is 24 vector instructions for 128 codes (4 to widen bytes, 4 shifts, 8 look-ups in a table of 16
  floats, 8 multiply-adds). Shifting whole lines and looking up in their words is 24 too, one of the look-ups for the
  scales: 8 % faster in a program of its own. Four neurons interleaved by bytes and added up by int8 dot products are 7
  a line and took a third of the time (2.2 instead of 6.7 ns, data in the second cache), but want the values of a
  fixed group of neurons quantised together, in the kernels of all instruction sets and their twins: not built.
  Layers that run dense lie in tiles instead.
* Without any fetch instructions, rows that lie apart came at a quarter of the speed of a stream.

## Without a gate

A neuron of OPT, and of other families whose FFN is act(x U^T + b) D^T + c, is two parts instead of three: its row,
which stands where a gate would and says whether it lives, and its column. In mode exact a token reads all rows, a half
of the FFN's bytes instead of a third, so that less can be saved; masks save as much as with gates. The kernels are the
same: a record says which it is (`ungated`), and batches without ups fetch columns alone. Biases go with their neurons
when `sparsify` orders these, and the thresholds of each neuron take them into account. Where the output is normed
(Gemma 2 to 4, OLMo 2) the residual is left to the norm. The curves below are those of neurons of three parts; they are
taken for these too, for nobody has measured them apart.
""".splitlines()[1:]
