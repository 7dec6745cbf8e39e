"""Every architecture in every type of weights as an ONNX model: checked, compared with our kernels and with NumPy.

    python benchmarks/onnx_models.py [--families NAME ...] [--types NAME ...] [--every N] [--jobs N]
                                     [--results FILE.jsonl] [--output FILE.md]

Each case is a tiny model of odd sizes, exported for sessions and for onnxruntime-genai, in f32 and in f16: four files
that onnx's checker and `edgeinfer verify` look at and onnxruntime's CPU provider runs. Types take turns with the tiny
models of an architecture. References compute with the values that the bundle's codes stand for: our kernels on a
bundle that holds these values in f32, because they quantise the activations that they multiply with codes; and the
tests' forward pass in NumPy, in float64. The difference of logits after 60 tokens is divided by the largest logit.
Greedy texts of 40 tokens are compared with those of our kernels; a token is close if the two that were chosen differ
by less than 1e-4 of the largest logit. Where onnxruntime-genai is installed, it opens each folder and generates the
same text.

With --results each case is appended to a file as it ends, and those in the file are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import measured, publish, row, table
from edgeinfer.backends import Flavour, export, verify_export
from edgeinfer.backends.onnx.lower_graph import lower_graph
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import build_graph, read_config, requested_types, supported_architectures
from tests.helpers.onnx_families import Storage, models, storages, write_floats, write_tiny
from tests.helpers.onnx_models import FLOATS, Slots, cpu_session, difference, expected, expected_in_f16, expected_surely
from tests.helpers.sessions import scored, session, tokens

CTX, PROMPT, NEW = 60, 20, 40
CLOSE = 1e-4
"""Of the largest logit."""
SECTION, REMEMBER = "onnx models", "edgeinfer.bundle.checksums.Passed.remember"
GENAI = find_spec("onnxruntime_genai") is not None


class Case(NamedTuple):
    """Figures of an architecture in a type of weights."""

    architecture: str
    type: str
    model: str
    f32: float
    """Largest difference from our kernels, of sessions."""
    reference: float
    """The same from NumPy."""
    f16: float
    """Of f16 from our kernels in f32."""
    rounding: float
    """The same of NumPy that rounds the results of operations to f16 and nothing else."""
    rows: int
    """Tokens that f16 is compared after: up to a router's choice that is close."""
    greedy: str
    """Empty if the text is that of our kernels; else what is different."""
    genai: str
    """Why there is no folder for onnxruntime-genai, if there is none."""
    genai_f32: float = 0.0
    genai_f16: float = 0.0
    genai_greedy: str = "not run"
    """As `greedy`, of a text that onnxruntime-genai generates."""


def is_lowered(architecture: str) -> bool:
    """Return whether there is an ONNX model of the architecture."""
    config = read_config(next(iter(models(architecture).values())))
    try:
        lower_graph(build_graph(config, requested_types("f32"), Recipe(())), Flavour().checked(config))
    except UnsupportedModelError:
        return False
    return True


def run(architecture: str, storage: Storage, index: int) -> Case:
    """Return the figures of one case."""
    names = list(models(architecture))
    name = names[0 if storage.nested else index % len(names)]
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"), mock.patch(REMEMBER):  # files of a second
        return compared(architecture, storage, name, write_tiny(name, storage, Path(folder) / "bundle"))


def compared(architecture: str, storage: Storage, name: str, bundle: Bundle) -> Case:
    """Return the figures of a model."""
    ids = tokens(CTX, 7, bundle.config.vocab_size)
    rounded = expected_in_f16(bundle, ids)
    wanted = expected(bundle, ids)
    rows = expected_surely(bundle, ids, 2 * float(np.median(np.abs(rounded - wanted).max(1))) / np.abs(wanted).max())[1]
    made = {dtype: exported(bundle, "session", dtype) for dtype in FLOATS}
    with session(write_floats(bundle, bundle.path.with_name("floats")), kv="f32", ctx=CTX, outputs=CTX) as kernels:
        ours = scored(kernels, ids)
        texts = Texts(kernels, ids[:PROMPT])
    slots = {dtype: Slots(path, flavour(bundle, "session", dtype)) for dtype, path in made.items()}
    found = {dtype: one.chunks(ids, 16) for dtype, one in slots.items()}
    case = Case(
        architecture, str(storage), name, difference(found["f32"], ours), difference(found["f32"], wanted),
        within(found["f16"], ours, rows), within(rounded, wanted, rows), rows,
        texts.unlike(greedy(slots["f32"], ids[:PROMPT])), "")
    try:
        folders = {dtype: exported(bundle, "genai", dtype) for dtype in FLOATS}
    except UnsupportedModelError as error:
        return case._replace(genai=str(error))
    logits = {dtype: all_logits(folder / "model.onnx", ids, FLOATS[dtype]) for dtype, folder in folders.items()}
    case = case._replace(genai_f32=difference(logits["f32"], ours), genai_f16=within(logits["f16"], ours, rows))
    if not GENAI:
        return case
    generated(folders["f16"], ids[:PROMPT], 1, texts.never)  # or it raises what it has against the folder
    return case._replace(genai_greedy=texts.unlike(generated(folders["f32"], ids[:PROMPT], NEW, texts.never)))


def flavour(bundle: Bundle, target: str, dtype: str) -> Flavour:
    """Return the variant of a model."""
    return Flavour(target, dtype, ctx=CTX).checked(bundle.config)


def exported(bundle: Bundle, target: str, dtype: str) -> Path:
    """Export a model, which onnx's checker and `verify` find right."""
    import onnx

    path = bundle.path.with_name(f"{target}-{dtype}{'.onnx' if target == 'session' else ''}")
    report = export(bundle, path, flavour(bundle, target, dtype))
    onnx.checker.check_model(str(report.model))
    verify_export(path)
    return path


def within(found: np.ndarray, wanted: np.ndarray, rows: int) -> float:
    """Return the difference of the first rows; 0 without any."""
    return difference(found[:rows], wanted[:rows]) if rows else 0.0


class Texts:
    """The greedy text of our kernels, and the logits behind it."""

    def __init__(self, kernels: Any, prompt: list[int]):
        sequence, self.logits = kernels.new_sequence(), list[np.ndarray]()
        self.logits.append(kernels.prefill(sequence, prompt).reshape(-1).copy())
        while len(self.logits) < NEW:
            self.logits.append(kernels.decode([sequence], [int(self.logits[-1].argmax())])[0].copy())

    @property
    def never(self) -> int:
        """A token that is far from being chosen."""
        return int(np.max(self.logits, axis=0).argmin())

    def unlike(self, found: list[int]) -> str:
        """Return what is different in a text; empty if it is equal."""
        for i, (token, logits) in enumerate(zip(found, self.logits, strict=True)):
            if token != (own := int(logits.argmax())):
                gap = float((logits[own] - logits[token]) / np.abs(logits).max())
                return f"{'close' if gap < CLOSE else 'another'} token {i}, by {gap:.1e}"
        return ""


def greedy(slots: Slots, prompt: list[int]) -> list[int]:
    """Return the text of an exported model."""
    found = [int(slots.chunks(prompt, 16)[-1].argmax())]
    while len(found) < NEW:
        found.append(int(slots.feed([found[-1:]])[0][0].argmax()))
    return found


def all_logits(path: Path, ids: list[int], kind: Any) -> np.ndarray:
    """Return the logits of a model with inputs of onnxruntime-genai, whose cache grows, in chunks of 16."""
    opened = cpu_session(path)
    past = {value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), kind) for value in opened.get_inputs()
            if value.name.startswith("past_")}
    names, rows = [value.name for value in opened.get_outputs()], list[np.ndarray]()
    for start in range(0, len(ids), 16):
        new = np.array([ids[start : start + 16]])
        mask = np.ones((1, start + new.shape[1]), np.int64)
        found = dict(zip(names, opened.run(names, {"input_ids": new, "attention_mask": mask, **past}), strict=True))
        past = {name: found[name.replace("past_key_values", "present")] for name in past}
        rows.append(found["logits"][0].astype(np.float32))
    return np.concatenate(rows)


def generated(folder: Path, prompt: list[int], n: int, end: int) -> list[int]:
    """Return the tokens that onnxruntime-genai chooses; `end` alone ends the text."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"eos_token_id": end}}))
    settings = onnxruntime_genai.GeneratorParams(model := onnxruntime_genai.Model(config))
    settings.set_search_options(do_sample=False, max_length=len(prompt) + n)
    generator, found = onnxruntime_genai.Generator(model, settings), list[int]()
    generator.append_tokens(prompt)
    while len(found) < n:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


# -- the tables ----------------------------------------------------------------------------------------------------

COLUMNS = "f32 | of NumPy's | f16 (rounding alone) | texts | genai: f32 | f16 | texts"


def summed(cases: list[Case]) -> list[str]:
    """Return the cells of a row: the worst of all cases, and the texts that are equal."""
    there = [case for case in cases if not case.genai]
    ran = [case.genai_greedy for case in there if case.genai_greedy != "not run"]
    rounded = max(cases, key=lambda case: case.f16)
    genai = [f"{max(case.genai_f32 for case in there):.1e}", f"{max(case.genai_f16 for case in there):.1e}",
             equal(ran) if ran else "not run"] if there else ["no", "", ""]
    return [f"{max(case.f32 for case in cases):.1e}", f"{max(case.reference for case in cases):.1e}",
            f"{rounded.f16:.1e} ({rounded.rounding:.1e})", equal([case.greedy for case in cases]), *genai]


def equal(texts: list[str]) -> str:
    """Return how many texts are equal, and what is different in others."""
    others = [text for text in texts if text]
    return f"{len(texts) - len(others)} of {len(texts)}" + (f"; {'; '.join(others)}" if others else "")


def by(cases: list[Case], field: str) -> dict[str, list[Case]]:
    """Return the cases with each value of a field, in the order of the first ones."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(getattr(case, field), []).append(case)
    return found


def text_of(cases: list[Case], refused: list[str]) -> str:
    """Return the tables, as Markdown."""
    order = {str(storage): i for i, storage in enumerate(storages())}
    families = by(sorted(cases, key=lambda case: (case.architecture, order[case.type])), "architecture")
    types = by(sorted(cases, key=lambda case: (order[case.type], case.architecture)), "type")
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnx", "onnxruntime", *(
        ["onnxruntime-genai"] if GENAI else [])))
    parts = [
        measured(f"{len(cases)} cases of {len(families)} architectures and {len(types)} types, {versions}").rstrip(),
        table(f"architecture | cases | {COLUMNS}", [row(name, len(own), *summed(own)) for name, own in
                                                    families.items()], right=True),
        "The same by types:",
        table(f"type | cases | {COLUMNS}", [row(name, len(own), *summed(own)) for name, own in types.items()],
              right=True),
        "Largest difference of each case in f32, from our kernels or NumPy, of sessions or genai, in millionths:",
        table(" | ".join(("architecture", *types)), [row(name, *cells(own, types)) for name, own in families.items()],
              right=True)]
    return "\n\n".join(parts + ([f"Refused: {', '.join(refused)}."] if refused else []))


def cells(cases: list[Case], types: Iterable[str]) -> Iterator[str]:
    """Return the largest difference in each type."""
    found = {case.type: f"{1e6 * max(case.f32, case.reference, case.genai_f32):.1f}" for case in cases}
    return (found.get(name, "") for name in types)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are missing in the file of results, and print or write the tables."""
    known = {str(storage): (i, storage) for i, storage in enumerate(storages())}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(supported_architectures()), metavar="NAME",
                        default=sorted(supported_architectures()))
    parser.add_argument("--types", nargs="+", choices=known, metavar="NAME", default=list(known),
                        help=f"of {', '.join(known)}")
    parser.add_argument("--every", type=int, default=1, help="run one of so many architectures, in turns, in each type")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced")
    given = parser.parse_args(arguments)
    lines = given.results.read_text().splitlines() if given.results and given.results.exists() else []
    cases = [Case(*json.loads(line)) for line in lines]
    families = [name for name in given.families if is_lowered(name)]
    done = {(case.architecture, case.type) for case in cases}
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        asked = {pool.submit(run, name, known[kind][1], known[kind][0]): (name, kind)
                 for kind in given.types for i, name in enumerate(families)
                 if (i + known[kind][0]) % given.every == 0 and (name, kind) not in done}
        for future in as_completed(asked):
            cases.append(future.result())
            print(*asked[future], row(*summed(cases[-1:])), file=sys.stderr, flush=True)
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(cases[-1]) + "\n")
    publish(text_of(cases, [name for name in given.families if name not in families]), given.output, SECTION)
    return 0


if __name__ == "__main__":
    sys.exit(main())
