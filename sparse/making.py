"""Conversion of a bundle to a sparse one: statistics, neurons sorted by activity, a predictor, and its quality."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.progress import OnProgress
from edgeinfer.base.validation import Rule, choice, instance
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
from edgeinfer.calibration.hooks import Hook, open_plain
from edgeinfer.calibration.statistics import Firing, Largest, capture
from edgeinfer.config import MAX_KLD
from edgeinfer.errors import RequestError, UnsupportedModelError, UsageError
from edgeinfer.graph import PREDICTORS, RELUS, Graph, Op, build_graph, expected_types
from edgeinfer.quality.evaluate import Evaluation, Stream, evaluate
from edgeinfer.quality.measurements import LEAST_TOKENS, QUALITY_FILE, Setting, identity, measurement, to_json
from edgeinfer.rules import MAKING, plain
from edgeinfer.runtime import Session, dense_layers, predicted_time

from .ffn import Ffn, biases, ffns, parts, stored_bytes
from .fitting import Fitted, check_epochs, check_rank, choose, fit, least_bytes
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
LEAST_HELD_OUT = 4 * LEAST_TOKENS
"""Tokens of a held-out text: a half of them measures, in windows of which some tokens may not count."""
ORDER_TOKENS = 8192
"""Most tokens from which the order of neurons is taken, and which layers stay dense."""
PREDICT_PASS = "sparse:mode=predict"
"""The step of a recipe whose measurement is made here."""
SIMULATED = "predictor simulated between the records of the dense program, windows of 512"


UNSEEN = ("It was measured on the end of the text that it was fitted to alone; on other authors and subjects the "
          "divergence may be larger: 1.03 and 1.07 times as large in our trials, up to 1.7 times the bound in others'. "
          "Measure it on texts of other kinds with --held-out FILE.")


@dataclass(frozen=True)
class Sparsified:
    """Report on a new predictor."""

    destination: Path
    predictor: Predictor
    layers: tuple[Tally, ...]
    """Selections of the predictor on the measured tokens, layer by layer."""
    read_share: float
    """Bytes that a token reads of all FFNs, predictor included, over those of the dense ones."""
    result: Evaluation
    """With the predictor, against the same bundle without it."""
    against_source: Evaluation
    """The bundle without predictor against the source: rounding by the new order, and of down matrices."""
    down_error: float
    """Squared error that quantising the down matrices again has added, over their squared norm; 0 if it was not."""
    enabled: bool
    """Whether the divergence is within the bound."""
    max_kld: float
    time: tuple[float, str]
    """Of the FFNs of a decoded token in memory, over those of the same model in tiles, dense; by whose curves."""
    dense: tuple[int, ...] = ()
    """Layers in tiles, without a predictor: leaving out neurons would not make them faster."""
    held_out: tuple[tuple[str, Evaluation], ...] = ()
    """As `result` on other texts, by their names."""

    @property
    def worst(self) -> float:
        """The largest mean divergence of all texts, which decides."""
        return max(kld_of(result) for _, result in (("", self.result), *self.held_out))

    @property
    def reason(self) -> str:
        """Why it is enabled, or by how much it missed."""
        kld = self.worst
        name = next((f" on {name}" for name, result in self.held_out if kld_of(result) == kld), "")
        if not self.enabled:
            return f"KLD {kld:.5f}{name} is {kld / self.max_kld:.2f} times the bound of {self.max_kld:g}"
        asked = f"; run needs --max-kld {self.max_kld:g} for it" if kld > MAX_KLD else ""
        return f"KLD {kld:.5f}{name} is within {self.max_kld:g}{asked}"

    @property
    def warning(self) -> str:
        """Warning that it was measured on its own text only; empty if other texts were measured too."""
        return "" if self.held_out else UNSEEN


def sparsify(source: Bundle, destination: str | Path, stream: Stream, *, kind: str | None = None,
             max_kld: float = MAX_KLD, rank: int | None = None, epochs: int = 0, threads: int | None = None,
             overwrite: bool = False, on_progress: OnProgress = lambda *_: None,
             in_tiles: Callable[[], Bundle] | None = None, held_out: Sequence[Stream] = ()) -> Sparsified:
    """Write a bundle with FFNs by neuron in order of heat, a predictor, statistics and a measurement.

    Layers of which this many neurons fire that dense they are faster stay in tiles.

    Parameters
    ----------
    source : Bundle
    destination : the bundle to make; nothing is left there if anything fails or is interrupted
    stream : the text's tokens: the last part measures the result, the part before chooses the price, the rest fits
    kind : {'sign', 'lowrank', 'threshold'}, by default lowrank where neurons are exactly 0, else threshold
    max_kld : bound of the divergence
    rank, epochs : as for `fit`
    on_progress : called with (stage, done, total, item)
    held_out : other texts to measure on, of the tokens after those that choose the price with the text's own: the
        predictor is to meet the bound on all texts, and the worst measurement decides
    in_tiles : gives the source with FFNs in tiles, where it has them by neuron; without it none of these is stored so

    Raises
    ------
    UsageError
        A predictor that does not suit the model's activation, or the bundle is sparse already.
    RequestError
        The text is too short.
    UnsupportedModelError
        The FFNs have too few zeros, are of several sizes, or of a type that layout neuron does not hold.
    DestinationError
        As for `convert`.
    """
    plain(locals(), RULES)  # or it is refused
    if any(entry.part in ("predictor", "statistics") for entry in source.header.files):
        raise UsageError(f"{source.path} is sparse already; give the checkpoint or the bundle that it was made of.")
    if Path(destination).resolve() == source.path.resolve():
        raise UsageError(f"{destination} is the source itself; take another name: the source is wanted to do it again.")
    networks = ffns(build_graph(source.config, expected_types(source.types)))
    kind = _kind(kind, networks)
    check_rank(rank, kind, source.config.hidden_size)
    check_epochs(epochs, kind)
    whole = graph = neuron_graph(source, networks)  # which refuses what cannot be stored so
    fitting, choosing, measuring = cut(stream)
    others = [cut_held_out(one) for one in held_out]
    with BundleWriter(destination, source.config, source.header.quantisation, overwrite=overwrite,
                      source=source.header.source) as writer, ExitStack() as stack:
        stored = [(graph.types[weight.name], weight.shape) for weight in graph.weights]
        writer.reserve(2 * sum(kind.nbytes(shape) for kind, shape in stored) + cold_bytes(stored))
        before = open_source(stack, source.path, source, threads, on_progress)
        fired = _activity(before, fitting.ids[:ORDER_TOKENS], on_progress)
        dense = _dense(kind, rank, fired, networks, graph)
        tiles = source if not networks[0].by_neuron else in_tiles() if in_tiles and dense else None
        dense = dense if tiles else []
        moved = [ffn for ffn in networks if ffn.layer not in dense]
        graph = neuron_graph(source, moved, tiles)
        orders = {ffn.layer: np.argsort(-one.counts, kind="stable").astype(np.int32) if ffn in moved
                  else np.arange(ffn.neurons, dtype=np.int32) for ffn, one in zip(networks, fired, strict=True)}
        work = writer.folder / "work"
        added = write_by_neuron(source, moved, graph, orders, work,
                                lambda done, total, name: on_progress("write", done, total, name), tiles)
        bundle = stack.enter_context(Bundle.open(work))
        session, reference = (open_source(stack, work, source, threads, on_progress, before) for _ in range(2))
        maker = _Maker(session, reference, bundle, ffns(session.graph))
        activity = _Activity(maker.networks)
        fitted = fit(session, bundle, maker.by_neuron, fitting.ids, kind, rank=rank, epochs=epochs,
                     on_progress=on_progress,
                     along=activity.hooks)
        predictor = fitted.at(maker.price(fitted, [choosing, *(a for a, _ in others)], max_kld, on_progress))
        result, tallies = maker.measure(predictor, measuring)
        elsewhere = [(text, maker.measure(predictor, text)[0]) for _, text in others]
        tallies = maker.of_layers(tallies, activity)
        against_source = evaluate(reference, measuring, reference=before, window=before.config.ctx)
        maker.store(writer, predictor, maker.statistics(activity, orders, tallies),
                    [(measuring, result), *elsewhere])
        stack.close()
        shutil.rmtree(work)
    nbytes = sum(whole.types[weight.name].nbytes(weight.shape) for weight in whole.weights if weight.kind == "ffn")
    gates = 1 / networks[0].parts
    share = read_bytes_share(predictor, sum(tallies, Tally()), nbytes, gates)
    time = predicted_time(predictor.kind, [one.read_share for one in tallies],
                          predictor.nbytes * len(networks) / len(moved) / nbytes, dense, gates)
    found = tuple((text.name, one) for text, one in elsewhere)
    within = all(kld_of(one) <= max_kld for one in (result, *(one for _, one in found)))
    return Sparsified(Path(destination), predictor, tuple(tallies), share, result, against_source, added.relative,
                      within, max_kld, time, tuple(dense), found)


_STREAM = instance(Stream, "the tokens of a text, such as evaluate.token_stream makes")


def _streams(value: Any) -> tuple[Stream, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return tuple(map(_STREAM.convert, value))


RULES = {**MAKING, "source": instance(Bundle, "an open Bundle"), "stream": _STREAM, "kind": choice(PREDICTORS),
         "held_out": Rule("a list of Streams", _streams)}
"""Of the options of `sparsify` and `screen_head`."""


def kld_of(result: Evaluation) -> float:
    """Return the mean divergence of an evaluation that had a reference."""
    assert result.divergence is not None
    return result.divergence.kld_mean


def open_source(stack: ExitStack, path: Path, source: Bundle, threads: int | None, on_progress: OnProgress,
                host: Session | None = None) -> Session:
    """A session whose activations can be read, closed by the stack."""
    window = min(WINDOW, source.config.max_position_embeddings)
    window -= window % OUTPUTS if window > OUTPUTS else 0  # no forward pass of a single token is left over
    session = open_plain(path, window, None if host else threads, host=host, outputs=OUTPUTS,
                         loading=partial(on_progress, "load"), progress=partial(on_progress, "compile"))
    stack.callback(session.close)
    return session


class _Activity:
    """Frequency of each layer's active neurons, and their largest outputs."""

    def __init__(self, networks: list[Ffn]):
        self.fired, self.largest = [Firing(ffn.f) for ffn in networks], [Largest(ffn.f) for ffn in networks]
        self.hooks: dict[Op, list[Hook]] = {ffn.op: [a, b] for ffn, a, b in
                                              zip(networks, self.fired, self.largest, strict=True)}


def _activity(session: Session, ids: Sequence[int], on_progress: OnProgress) -> list[Firing]:
    """Count how often neurons fire, layer by layer."""
    fired = [Firing(ffn.f) for ffn in ffns(session.graph)]
    capture(session, ids, {ffn.op: [one] for ffn, one in zip(ffns(session.graph), fired, strict=True)},
            progress=lambda done, total, _: on_progress("capture", done, total, "order of neurons"))
    return fired


@dataclass(frozen=True)
class _Maker:
    """Fitting and measuring of a predictor for a bundle by neuron."""

    session: Session
    reference: Session
    bundle: Bundle
    networks: list[Ffn]

    @property
    def by_neuron(self) -> list[Ffn]:
        """The layers that have a predictor."""
        return [ffn for ffn in self.networks if ffn.by_neuron]

    def measure(self, predictor: Predictor, stream: Stream) -> tuple[Evaluation, list[Tally]]:
        """Return the divergence of a predictor on a text, and what it chose."""
        gates = (parts(self.bundle, ffn).gate if predictor.kind == "threshold" else
                 np.empty((ffn.neurons, ffn.x.width), np.float32) for ffn in self.by_neuron)  # others need its shape
        scores = [scorer(predictor, ffn.layer, gate, ffn.activation, biases(self.bundle, ffn)[0])
                  for ffn, gate in zip(self.by_neuron, gates, strict=True)]
        runner, tallies = predicted(self.session, self.by_neuron, scores,
                                    [predictor.thresholds[ffn.layer] for ffn in self.by_neuron])
        return evaluate(runner, stream, reference=self.reference, window=runner.config.ctx), tallies

    def of_layers(self, tallies: list[Tally], activity: _Activity) -> list[Tally]:
        """Return what each layer chose; one in tiles computes all neurons."""
        found, measured = dict(zip((ffn.layer for ffn in self.by_neuron), tallies, strict=True)), tallies[0].neurons
        fired = (round(measured * float(one.counts.mean()) / one.tokens) for one in activity.fired)
        return [found.get(ffn.layer, Tally(measured, measured, n, n))
                for ffn, n in zip(self.networks, fired, strict=True)]

    def price(self, fitted: Fitted, texts: Sequence[Stream], max_kld: float, on_progress: OnProgress) -> int:
        """Return the highest price within the bound on all texts."""
        tried: list[float] = []

        def divergence(predictor: Predictor) -> float:
            tried.append(max(kld_of(self.measure(predictor, text)[0]) for text in texts))
            on_progress("price", len(tried), 4, f"KLD {tried[-1]:.4f}")
            return tried[-1]

        return choose(fitted, divergence, max_kld)

    def store(self, writer: BundleWriter, predictor: Predictor, statistics: Statistics,
              results: Sequence[tuple[Stream, Evaluation]]) -> None:
        """Write the weights as they are, the parts that belong to them, and the measurements on these texts."""
        copy_weights(self.bundle, writer)
        weights = weights_identity(self.bundle.header.tensors)
        file = writer.add_file(PREDICTOR_FILE, b"".join(predictor.pack(weights)), "predictor")
        writer.add_file(STATISTICS_FILE, b"".join(statistics.pack(weights)), "statistics")
        if predictor.kind != "threshold":  # that one needs the gates of all neurons
            writer.add_file(COLD_FILE, pack_cold(self.bundle.header.tensors,
                                                 lambda entry: stored_bytes(self.bundle, entry.name)), "cold")
        setting = Setting.of(kv=self.session.config.kv, passes=PREDICT_PASS)
        made = [measurement(setting, result, identity(weights, file.sha256), protocol=SIMULATED, stream=text,
                            isa=self.session.isa) for text, result in results]
        writer.add_file(QUALITY_FILE, to_json(made), "quality")

    def statistics(self, activity: _Activity, orders: dict[int, NDArray[np.int32]],
                   tallies: list[Tally]) -> Statistics:
        """Return the neurons' activity, in the order in which they are stored now, and what masks chose of a text."""
        tokens = activity.fired[0].tokens
        chosen = (round(one.read_share * tokens * ffn.neurons) for one, ffn in zip(tallies, self.networks, strict=True))
        return Statistics(tokens, tuple(one.counts for one in activity.fired),
                          tuple(one.values for one in activity.largest),
                          tuple(orders[ffn.layer] for ffn in self.networks), tuple(np.array([n]) for n in chosen))


def _kind(kind: str | None, networks: list[Ffn]) -> str:
    """The predictor that suits the activation, or the one requested if it does."""
    activation = networks[0].activation
    zeros = activation in RELUS
    if not zeros and kind in ("sign", "lowrank"):
        raise UsageError(f"A {kind} predictor tells which gates are above 0, but {activation} is not 0 below; take "
                         "--predictor threshold.")
    return kind or ("lowrank" if zeros else "threshold")


def _dense(kind: str, rank: int | None, fired: list[Firing], networks: list[Ffn], graph: Graph) -> list[int]:
    """Return the layers in which too many neurons are active for skipping to pay; refuse if that is all of them."""
    if kind == "threshold":
        return []
    densities = [float(one.counts.mean()) / one.tokens for one in fired]
    weight = next(weight for weight in graph.weights if weight.kind == "ffn")
    predictor = least_bytes(kind, rank, networks[0]) / graph.types[weight.name].nbytes(weight.shape)
    found, basis = dense_layers(densities, predictor, gates=1 / networks[0].parts)
    if len(found) == len(networks):
        shown = ", ".join(f"{density:.0%}" for density in densities[:8]) + (", ..." if len(densities) > 8 else "")
        raise UnsupportedModelError(f"The model's neurons fire for {shown} of the tokens, layer by layer: there is too "
                                    f"little to leave out, by {basis}. It runs as it is, dense.")
    return found


def cut(stream: Stream) -> tuple[Stream, Stream, Stream]:
    """Split a text from its beginning to its end: to fit on, to choose the price on, and to measure on."""
    n = len(stream.ids)
    if n < MIN_TOKENS:
        raise RequestError(f"The text has {n} tokens, too few to learn from; give {MIN_TOKENS} at least, and better "
                           "ten times as many.")
    some = min(MEASURED_TOKENS, n // 5)
    a, b = n - 2 * some, n - some
    first = max(0, a - CALIBRATION_TOKENS)
    end = f"the end of {stream.name}" if stream.name else ""
    return _part(stream, first, a), _part(stream, a, b), replace(_part(stream, b, n), name=end)


def cut_held_out(stream: Stream) -> tuple[Stream, Stream]:
    """Split another text: to choose the price on, and to measure on."""
    n = min(len(stream.ids), 2 * MEASURED_TOKENS)
    if n < LEAST_HELD_OUT:
        raise RequestError(f"The held-out text {stream.name} has {n} tokens, too few to measure on; give "
                           f"{LEAST_HELD_OUT} at least.")
    return _part(stream, 0, n // 2), _part(stream, n // 2, n)


def _part(stream: Stream, start: int, stop: int) -> Stream:
    """A part of a stream that is not cut into a window of a single token."""
    stop -= (stop - start - 1) % OUTPUTS == 1
    share = (stop - start) / len(stream.ids)
    return Stream(tuple(stream.ids[start:stop]), tuple(stream.counted[start:stop]),
                  max(round(stream.text_bytes * share), 1), stream.name)
