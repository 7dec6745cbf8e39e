"""Conversion of a bundle to one with a screen of its output head, and the quality of the screen."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.progress import OnProgress
from edgeinfer.bundle import SCREEN_FILE, Bundle, BundleWriter, HeadScreen, weights_identity
from edgeinfer.config import MAX_KLD, Recipe, RuntimeConfig
from edgeinfer.errors import UsageError
from edgeinfer.graph import find_head
from edgeinfer.quality.evaluate import Evaluation, Stream, evaluate
from edgeinfer.quality.measurements import QUALITY_FILE, Setting, measured_identity, measurement, read_quality, to_json
from edgeinfer.registry import plain, recipe_with
from edgeinfer.runtime import Session, everywhere

from .head import make_screen
from .making import RULES, check_destination, open_source
from .neurons import copy_weights
from .sparsified import kld_of
from .texts import OUTPUTS, cut, cut_held_out

PROTOCOL = "windows of 512, tokens decoded together"


@dataclass(frozen=True)
class Screened:
    """Report on a new screen."""

    destination: Path
    screen: HeadScreen
    read_share: float
    """Bytes that a sampled token reads of head and screen, over those of the head."""
    results: tuple[tuple[Setting, Evaluation], ...]
    """The screen alone, and together with the bundle's predictor where it has one, against the bundle without both;
    of several texts the worst."""
    max_kld: float

    @property
    def reasons(self) -> list[str]:
        """Return for each setting whether it is enabled, and why."""
        return [f"{setting}: KLD {kld_of(result):.5f} is " + (
            f"within {self.max_kld:g}; enabled" if kld_of(result) <= self.max_kld
            else f"{kld_of(result) / self.max_kld:.1f} times the bound of {self.max_kld:g}; not enabled")
            for setting, result in self.results]


def screen_head(source: Bundle, destination: str | Path, stream: Stream, *, max_kld: float = MAX_KLD,
                rank: int | None = None, threads: int | None = None, overwrite: bool = False,
                on_progress: OnProgress = lambda *_: None, held_out: Sequence[Stream] = ()) -> Screened:
    """Write a bundle with everything that a bundle has, a screen of its head, and measurements of it.

    Parameters and exceptions are those of `sparsify` and `make_screen`.
    """
    plain(locals(), RULES)  # or it is refused
    if any(entry.part == "screen" for entry in source.header.files):
        raise UsageError(f"The head of {source.path} is screened already; give the bundle that it was made of.")
    check_destination(source, destination)
    fitting, _, measuring = cut(stream)
    with BundleWriter(destination, source.config, source.header.quantisation, overwrite=overwrite,
                      source=source.header.source) as writer, ExitStack() as stack:
        writer.reserve(2 * (source.weights_bytes + sum(entry.nbytes for entry in source.header.files)))
        session = open_source(stack, source.path, source, threads, on_progress)
        screen = make_screen(session, source, fitting.ids, rank=rank, on_progress=on_progress)
        work = writer.folder / "work"
        with BundleWriter(work, source.config, source.header.quantisation, source=source.header.source) as copy:
            _write(copy, source, screen)
        measured = [(text, _measure(work, text, session, on_progress))
                    for text in (measuring, *(cut_held_out(one)[1] for one in held_out))]
        stack.close()
        with Bundle.open(work) as made:
            weights = measured_identity(made)
        before = measured_identity(source)
        known = [replace(one, weights=weights) for one in read_quality(source) if one.weights == before]
        known += [measurement(setting, result, weights, protocol=PROTOCOL, stream=text, isa=session.isa)
                  for text, results in measured for setting, result in results]
        _write(writer, source, screen)
        writer.add_file(QUALITY_FILE, to_json(known), "quality")
        shutil.rmtree(work)
    head = find_head(session.graph).head.weight
    nbytes = session.graph.types[head.name].nbytes(head.shape)
    return Screened(Path(destination), screen, screen.share + screen.nbytes / nbytes,
                    tuple(max(of_setting, key=lambda one: kld_of(one[1])) for of_setting in zip(
                        *(results for _, results in measured), strict=True)), max_kld)


def _write(writer: BundleWriter, source: Bundle, screen: HeadScreen) -> None:
    """Copy a bundle with its parts, and add the screen."""
    copy_weights(source, writer)
    for entry in source.header.files:
        if entry.part not in ("", "quality"):
            writer.copy_file(source.path / entry.name, part=entry.part)
    writer.add_file(SCREEN_FILE, screen.pack(weights_identity(source.header.tensors)), "screen")


def _measure(path: Path, stream: Stream, host: Session, on_progress: OnProgress) -> list[tuple[Setting, Evaluation]]:
    """Divergence of the screen, and of screen and predictor together, as the kernels run them."""
    results = []
    with ExitStack() as stack:
        def opened(recipe: Recipe) -> Session:
            config = RuntimeConfig(ctx=host.config.ctx, kv=host.config.kv, outputs=OUTPUTS, recipe=recipe)
            session = Session(stack.enter_context(Bundle.open(path)), config, host=host)
            stack.callback(session.close)
            return session

        exact = opened(Recipe())
        modes = [None, "predict"] if any(entry.part == "predictor" for entry in exact.bundle.header.files) else [None]
        for mode in modes:
            recipe = recipe_with(sparse=mode, head="screened")
            result = evaluate(opened(everywhere(recipe)), stream, reference=exact, window=host.config.ctx, decoded=True,
                              progress=lambda done, total, _: on_progress("measure", done, total, "tokens"))
            results.append((Setting.of_run(RuntimeConfig(kv=host.config.kv, recipe=recipe)), result))
    return results
