"""Conversion of a bundle to a sparse one: statistics, neurons sorted by activity, a predictor, and its quality."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from edgeinfer.errors import UnsupportedModelError, UsageError
from edgeinfer.graph import PREDICTORS, RELUS, Graph, Op, build_graph, expected_types
from edgeinfer.quality.evaluate import Evaluation, Stream, evaluate
from edgeinfer.quality.measurements import QUALITY_FILE, Setting, identity, measurement, to_json
from edgeinfer.registry import MAKING, plain
from edgeinfer.runtime import Session, dense_layers, predicted_time

from .ffn import Ffn, biases, ffns, parts, stored_bytes
from .fitting import Fitted, check_epochs, check_rank, choose, fit, least_bytes
from .neurons import copy_weights, neuron_graph, write_by_neuron
from .predictors import scorer
from .simulate import Tally, predicted, read_bytes_share
from .sparsified import Sparsified, kld_of
from .texts import OUTPUTS, cut, cut_held_out

WINDOW = 512
ORDER_TOKENS = 8192
"""Most tokens from which the order of neurons is taken, and which layers stay dense."""
PREDICT_PASS = "sparse:mode=predict"
"""The step of a recipe whose measurement is made here."""
SIMULATED = "predictor simulated between the records of the dense program, windows of 512"


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
    stream : the text's tokens: the last part measures the result, the part before chooses lambda, the rest fits
    kind : {'sign', 'lowrank', 'threshold'}, by default lowrank where neurons are exactly 0, else threshold
    max_kld : bound of the divergence
    rank, epochs : as for `fit`
    on_progress : called with (stage, done, total, item)
    held_out : other texts to measure on, of the tokens after those that choose lambda with the text's own: the
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
    if source.parts & {"predictor", "statistics"}:
        raise UsageError(f"{source.path} is sparse already; give the checkpoint or the bundle that it was made of.")
    check_destination(source, destination)
    networks = ffns(build_graph(source.config, expected_types(source.types)))
    kind = _kind(kind, networks)
    check_rank(rank, kind, source.config.hidden_size)
    check_epochs(epochs, kind)
    graph = neuron_graph(source, networks)  # refuses models that cannot be stored so
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
        work = writer.folder / "work"
        orders, down_error = _write_in_order(work, source, networks, fired, dense, tiles, on_progress)
        bundle = stack.enter_context(Bundle.open(work))
        session, reference = (open_source(stack, work, source, threads, on_progress, before) for _ in range(2))
        maker = _Maker(session, reference, bundle, ffns(session.graph))
        activity = _Activity(maker.networks)
        fitted = fit(session, bundle, maker.by_neuron, fitting.ids, kind, rank=rank, epochs=epochs,
                     on_progress=on_progress, along=activity.hooks)
        predictor = fitted.at(maker.lambda_index(fitted, [choosing, *(a for a, _ in others)], max_kld, on_progress))
        result, tallies = maker.measure(predictor, measuring)
        elsewhere = [(text, maker.measure(predictor, text)[0]) for _, text in others]
        tallies = maker.of_layers(tallies, activity)
        against_source = evaluate(reference, measuring, reference=before, window=before.config.ctx)
        maker.store(writer, predictor, maker.statistics(activity, orders, tallies), [(measuring, result), *elsewhere])
        stack.close()
        shutil.rmtree(work)
    share, time = _gain(predictor, tallies, networks, dense, graph)
    within = all(kld_of(one) <= max_kld for one in (result, *(one for _, one in elsewhere)))
    return Sparsified(Path(destination), predictor, tuple(tallies), share, result, against_source, down_error, within,
                      max_kld, time, tuple(dense), tuple((text.name, one) for text, one in elsewhere))


def check_destination(source: Bundle, destination: str | Path) -> None:
    """Refuse to write a bundle over its source."""
    if Path(destination).resolve() == source.path.resolve():
        raise UsageError(f"{destination} is the source itself; choose another name, to keep the source for later runs.")


def _write_in_order(
    path: Path, source: Bundle, networks: list[Ffn], fired: list[Firing], dense: list[int], tiles: Bundle | None,
    on_progress: OnProgress,
) -> tuple[dict[int, NDArray[np.int32]], float]:
    """Write a bundle by neuron, the most active first, but for dense layers; returns the orders and `down_error`."""
    moved = [ffn for ffn in networks if ffn.layer not in dense]
    orders = {ffn.layer: np.argsort(-one.counts, kind="stable").astype(np.int32) if ffn in moved
              else np.arange(ffn.neurons, dtype=np.int32) for ffn, one in zip(networks, fired, strict=True)}
    added = write_by_neuron(source, moved, neuron_graph(source, moved, tiles), orders, path,
                            lambda done, total, name: on_progress("write", done, total, name), tiles)
    return orders, added.relative


def _gain(predictor: Predictor, tallies: list[Tally], networks: list[Ffn], dense: list[int],
          graph: Graph) -> tuple[float, tuple[float, str]]:
    """Return the bytes and the time of a decoded token over those of dense FFNs, the time with its basis."""
    nbytes = sum(graph.types[weight.name].nbytes(weight.shape) for weight in graph.weights if weight.kind == "ffn")
    gates, moved = 1 / networks[0].parts, sum(ffn.layer not in dense for ffn in networks)
    time = predicted_time(predictor.kind, [one.read_share for one in tallies],
                          predictor.nbytes * len(networks) / moved / nbytes, dense, gates)
    return read_bytes_share(predictor, sum(tallies, Tally()), nbytes, gates), time


_STREAM = instance(Stream, "the tokens of a text, such as evaluate.token_stream makes")


def _streams(value: Any) -> tuple[Stream, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return tuple(map(_STREAM.convert, value))


RULES = {**MAKING, "source": instance(Bundle, "an open Bundle"), "stream": _STREAM, "kind": choice(PREDICTORS),
         "held_out": Rule("a list of Streams", _streams)}
"""Rules of the options of `sparsify` and `screen_head`."""


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
        """Return the divergence of a predictor on a text, and the neurons that it chose."""
        gates = (parts(self.bundle, ffn).gate if predictor.kind == "threshold" else
                 np.empty((ffn.neurons, ffn.x.width), np.float32) for ffn in self.by_neuron)  # others need its shape
        scores = [scorer(predictor, ffn.layer, gate, ffn.activation, biases(self.bundle, ffn)[0])
                  for ffn, gate in zip(self.by_neuron, gates, strict=True)]
        runner, tallies = predicted(self.session, self.by_neuron, scores,
                                    [predictor.thresholds[ffn.layer] for ffn in self.by_neuron])
        return evaluate(runner, stream, reference=self.reference, window=runner.config.ctx), tallies

    def of_layers(self, tallies: list[Tally], activity: _Activity) -> list[Tally]:
        """Return the neurons that each layer chose; a dense layer computes all."""
        found, measured = dict(zip((ffn.layer for ffn in self.by_neuron), tallies, strict=True)), tallies[0].neurons
        fired = (round(measured * float(one.counts.mean()) / one.tokens) for one in activity.fired)
        return [found.get(ffn.layer, Tally(measured, measured, n, n))
                for ffn, n in zip(self.networks, fired, strict=True)]

    def lambda_index(self, fitted: Fitted, texts: Sequence[Stream], max_kld: float, on_progress: OnProgress) -> int:
        """Return the index of the highest lambda within the bound on all texts."""
        tried: list[float] = []

        def divergence(predictor: Predictor) -> float:
            tried.append(max(kld_of(self.measure(predictor, text)[0]) for text in texts))
            on_progress("lambda", len(tried), 4, f"KLD {tried[-1]:.4f}")
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
        """Return the neurons' activity, in the order in which they are stored now, and the neurons that masks chose on
        a text."""
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
        raise UsageError(f"A {kind} predictor finds which gates are above 0, but {activation} is not 0 below; use "
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
        raise UnsupportedModelError(f"The model's neurons fire for {shown} of the tokens, layer by layer: skipping the "
                                    f"others does not pay, by {basis}. It runs as it is, dense.")
    return found


