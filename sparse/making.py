"""From a bundle to a sparse one: statistics, neurons in order of heat, a predictor, and what it costs in quality."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import (
    COLD_FILE,
    PREDICTOR_FILE,
    STATISTICS_FILE,
    Bundle,
    BundleWriter,
    Predictor,
    Statistics,
    cold_bytes,
    pack_cold,
    weights_identity,
)
from edgeinfer.dataclass import dataclass
from edgeinfer.errors import RequestError, UnsupportedModelError, UsageError
from edgeinfer.evaluate import Evaluation, Stream, evaluate
from edgeinfer.graph import RELUS, Op, build_graph, expected_types
from edgeinfer.quality import MAX_KLD, QUALITY_FILE, Setting, identity, measurement, to_json
from edgeinfer.runtime import Firing, Largest, Session, Visit, capture, open_plain

from .ffn import Ffn, ffns, parts, stored_bytes
from .fitting import Fitted, Told, check_rank, choose, fit
from .neurons import copy_weights, neuron_graph, write_by_neuron
from .predictors import scorer
from .simulate import Tally, predicted, read_bytes_share

WINDOW = 512
OUTPUTS = 64
CALIBRATION_TOKENS, MEASURED_TOKENS = 32768, 2048
"""Most tokens for statistics and factors, and most to measure a divergence on, twice: the price is searched on other
tokens than the result is measured on."""
MOST_TOKENS = CALIBRATION_TOKENS + 2 * MEASURED_TOKENS
MIN_TOKENS = 2048
DENSE = 0.95
"""Share of neurons that fire from which on an FFN has no zeros worth leaving out."""
PREDICT_PASS = "sparse:mode=predict"
"""The step of a recipe whose measurement is made here."""
SIMULATED = "predictor simulated between the records of the dense program, windows of 512"


@dataclass(frozen=True)
class Sparsified:
    """What was made, and what it costs."""

    destination: Path
    predictor: Predictor
    layers: tuple[Tally, ...]
    """What the predictor chose, layer by layer, on the measured tokens."""
    read_share: float
    """Bytes that a token reads of all FFNs, predictor included, over those of the dense ones."""
    result: Evaluation
    """With the predictor, against the same bundle without it."""
    against_source: Evaluation
    """The bundle without predictor against the source: rounding by the new order, and of down matrices."""
    down_error: float
    """Squared error that quantising the down matrices again has added, over their squared norm; 0 where it was not."""
    enabled: bool
    """Whether the divergence is within the bound."""
    max_kld: float

    @property
    def reason(self) -> str:
        """Why it is enabled, or by how much it missed."""
        kld = kld_of(self.result)
        if self.enabled:
            return f"KLD {kld:.5f} is within {self.max_kld:g}"
        return f"KLD {kld:.5f} is {kld / self.max_kld:.1f} times the bound of {self.max_kld:g}"


def sparsify(source: Bundle, destination: str | Path, stream: Stream, *, kind: str | None = None,
             max_kld: float = MAX_KLD, rank: int | None = None, threads: int | None = None, overwrite: bool = False,
             told: Told = lambda *_: None) -> Sparsified:
    """Write a bundle with FFNs by neuron in order of heat, a predictor, statistics and a measurement.

    Parameters
    ----------
    source : Bundle
    destination : the bundle to make; nothing is left there if anything fails or is interrupted
    stream : the text's tokens: the last part measures the result, the part before chooses the price, the rest fits
    kind : {'sign', 'lowrank', 'threshold'}, by default lowrank where neurons are exactly 0, else threshold
    max_kld : bound of the divergence
    rank : as for `fit`
    told : called with (stage, done, total, item)

    Raises
    ------
    UsageError
        A predictor that does not suit the model's activation, or the bundle is sparse already.
    RequestError
        The text is too short.
    UnsupportedModelError
        The FFNs have no zeros, no gates, or are of a type that layout neuron does not hold.
    DestinationError
        As for `convert`.
    """
    if any(entry.part in ("predictor", "statistics") for entry in source.header.files):
        raise UsageError(f"{source.path} is sparse already; give the checkpoint or the bundle that it was made of.")
    if Path(destination).resolve() == source.path.resolve():
        raise UsageError(f"{destination} is the source itself; take another name: the source is wanted to do it again.")
    networks = ffns(build_graph(source.config, expected_types(source.types)))
    kind = _kind(kind, networks)
    check_rank(rank, kind, source.config.hidden_size)
    graph = neuron_graph(source, networks)
    fitting, choosing, measuring = cut(stream)
    with BundleWriter(destination, source.config, source.header.quantisation, overwrite=overwrite,
                      source=source.header.source) as writer, ExitStack() as stack:
        stored = [(graph.types[weight.name], weight.shape) for weight in graph.weights]
        writer.reserve(2 * sum(kind.nbytes(shape) for kind, shape in stored) + cold_bytes(stored))
        before = open_source(stack, source.path, source, threads)
        fired, _ = heat(before, ffns(before.graph), fitting.ids, told)
        _refuse_dense(kind, fired)
        orders = [np.argsort(-one.counts, kind="stable").astype(np.int32) for one in fired]
        work = writer.folder / "work"
        added = write_by_neuron(source, networks, graph, orders, work,
                                lambda done, total, name: told("write", done, total, name))
        bundle = stack.enter_context(Bundle.open(work))
        session, reference = (open_source(stack, work, source, threads, before) for _ in range(2))
        maker = _Maker(session, reference, bundle, ffns(session.graph))
        fitted = fit(session, bundle, maker.networks, fitting.ids, kind, rank=rank, told=told)
        predictor = fitted.at(maker.price(fitted, choosing, max_kld, told))
        result, tallies = maker.measure(predictor, measuring)
        against_source = evaluate(reference, measuring, reference=before, window=before.config.ctx)
        maker.store(writer, predictor, maker.statistics(fitting, orders, tallies, told), result, measuring.ids)
        stack.close()
        shutil.rmtree(work)
    dense = sum(graph.types[ffn.op.weight.name].nbytes(ffn.op.weight.shape) for ffn in maker.networks)
    share = read_bytes_share(predictor, sum(tallies, Tally()), dense)
    return Sparsified(Path(destination), predictor, tuple(tallies), share, result, against_source, added.relative,
                      kld_of(result) <= max_kld, max_kld)


def kld_of(result: Evaluation) -> float:
    """Return the mean divergence of an evaluation that had a reference."""
    assert result.divergence is not None
    return result.divergence.kld_mean


def open_source(stack: ExitStack, path: Path, source: Bundle, threads: int | None,
                host: Session | None = None) -> Session:
    """A session whose activations can be read, closed by the stack."""
    window = min(WINDOW, source.config.max_position_embeddings)
    window -= window % OUTPUTS if window > OUTPUTS else 0  # no walk of a single token is left over
    session = open_plain(path, window, None if host else threads, host=host, outputs=OUTPUTS)
    stack.callback(session.close)
    return session


def heat(session: Session, networks: list[Ffn], ids: tuple[int, ...], told: Told) -> tuple[list[Firing], list[Largest]]:
    """Count how often neurons fire, and how much they give at most, layer by layer."""
    fired, largest = [Firing(ffn.f) for ffn in networks], [Largest(ffn.f) for ffn in networks]
    visits: dict[Op, list[Visit]] = {ffn.op: [a, b] for ffn, a, b in zip(networks, fired, largest, strict=True)}
    capture(session, ids, visits,
            progress=lambda done, total, _: told("capture", done, total, "activity of neurons"))
    return fired, largest


@dataclass(frozen=True)
class _Maker:
    """What fits and measures a predictor of a bundle by neuron."""

    session: Session
    reference: Session
    bundle: Bundle
    networks: list[Ffn]

    def measure(self, predictor: Predictor, stream: Stream) -> tuple[Evaluation, list[Tally]]:
        """Return the divergence of a predictor on a text, and what it chose."""
        scores = [scorer(predictor, i, parts(self.bundle, ffn).gate, ffn.op.activation)
                  for i, ffn in enumerate(self.networks)]
        runner, tallies = predicted(self.session, self.networks, scores, predictor.thresholds)
        return evaluate(runner, stream, reference=self.reference, window=runner.config.ctx), tallies

    def price(self, fitted: Fitted, stream: Stream, max_kld: float, told: Told) -> int:
        """Return the highest price within the bound."""
        tried: list[float] = []

        def divergence(predictor: Predictor) -> float:
            tried.append(kld_of(self.measure(predictor, stream)[0]))
            told("price", len(tried), 4, f"KLD {tried[-1]:.4f}")
            return tried[-1]

        return choose(fitted, divergence, max_kld)[0]

    def store(self, writer: BundleWriter, predictor: Predictor, statistics: Statistics, result: Evaluation,
              ids: tuple[int, ...]) -> None:
        """Write the weights as they are, the parts that belong to them, and the measurement on these tokens."""
        copy_weights(self.bundle, writer)
        weights = weights_identity(self.bundle.header.tensors)
        file = writer.add_file(PREDICTOR_FILE, b"".join(predictor.pack(weights)), "predictor")
        writer.add_file(STATISTICS_FILE, b"".join(statistics.pack(weights)), "statistics")
        if predictor.kind != "threshold":  # that one needs the gates of all neurons
            writer.add_file(COLD_FILE, pack_cold(self.bundle.header.tensors,
                                                 lambda entry: stored_bytes(self.bundle, entry.name)), "cold")
        setting = Setting.of(kv=self.session.config.kv, passes=PREDICT_PASS)
        made = measurement(setting, result, identity(weights, file.sha256), protocol=SIMULATED, ids=ids,
                           isa=self.session.isa)
        writer.add_file(QUALITY_FILE, to_json([made]), "quality")

    def statistics(self, stream: Stream, orders: list[NDArray[np.int32]], tallies: list[Tally],
                   told: Told) -> Statistics:
        """Return the neurons' activity, in the order in which they are stored now, and what masks chose of a text."""
        fired, largest = heat(self.session, self.networks, stream.ids, told)
        tokens = fired[0].tokens
        chosen = (round(one.read_share * tokens * ffn.neurons) for one, ffn in zip(tallies, self.networks, strict=True))
        return Statistics(tokens, tuple(one.counts for one in fired), tuple(one.values for one in largest),
                          tuple(orders), tuple(np.array([n]) for n in chosen))


def _kind(kind: str | None, networks: list[Ffn]) -> str:
    """The predictor that suits the activation, or the one asked for if it does."""
    activation = networks[0].op.activation
    zeros = activation in RELUS
    if not zeros and kind in ("sign", "lowrank"):
        raise UsageError(f"A {kind} predictor tells which gates are above 0, but {activation} is not 0 below; take "
                         "--predictor threshold.")
    return kind or ("lowrank" if zeros else "threshold")


def _refuse_dense(kind: str, fired: list[Firing]) -> None:
    densities = [float(one.counts.mean()) / one.tokens for one in fired]
    if kind != "threshold" and min(densities) > DENSE:
        shown = ", ".join(f"{density:.0%}" for density in densities[:8]) + (", ..." if len(densities) > 8 else "")
        raise UnsupportedModelError(f"The model's neurons fire for {shown} of the tokens, layer by layer: there is "
                                    "next to nothing to leave out. It runs as it is, dense.")


def cut(stream: Stream) -> tuple[Stream, Stream, Stream]:
    """What is fitted on, what the price is chosen on, and what is measured on, from the text's beginning to its end."""
    n = len(stream.ids)
    if n < MIN_TOKENS:
        raise RequestError(f"The text has {n} tokens, too few to learn from; give {MIN_TOKENS} at least, and better "
                           "ten times as many.")
    some = min(MEASURED_TOKENS, n // 5)
    a, b = n - 2 * some, n - some
    first = max(0, a - CALIBRATION_TOKENS)
    return _part(stream, first, a), _part(stream, a, b), _part(stream, b, n)


def _part(stream: Stream, start: int, stop: int) -> Stream:
    """A part of a stream that is not cut into a window of a single token."""
    stop -= (stop - start - 1) % OUTPUTS == 1
    share = (stop - start) / len(stream.ids)
    return Stream(stream.ids[start:stop], stream.counted[start:stop], max(round(stream.text_bytes * share), 1))
