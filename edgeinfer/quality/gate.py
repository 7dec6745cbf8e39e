"""The quality gate: the approximations that may be enabled automatically, and the verdict on requested ones.

The divergences of techniques do not add up, so a setting comprises all of them, and only a measurement of exactly that
setting with exactly these weights counts. Measurements are in the bundle (part ``quality``) or in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import __version__
from ..base.cache_dir import cache_root, make_directories
from ..base.dataclass import dataclass
from ..base.files import open_plain, replacement
from ..base.strict_json import parse_json
from ..config import MAX_KLD as MAX_KLD
from ..config import RuntimeConfig
from ..errors import BundleError
from ..registry import each, recipe_with, techniques
from ..technique import Technique
from .evaluate import Evaluation, Stream

if TYPE_CHECKING:
    from ..bundle import Bundle

LEAST_TOKENS = 100
"""A mean over fewer tokens says too little to enable anything."""
QUALITY_FILE = "quality.json"
MAX_BYTES = 1 << 20
MOST_KEPT = 1000
"""Measurements in a file of the cache; older ones are dropped."""


@dataclass(frozen=True)
class Setting:
    """Approximations of a run beside their context: names and values, in the order of their names."""

    values: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, /, **values: str) -> Setting:
        """Return the setting with these values."""
        return cls(tuple(sorted(values.items())))

    @classmethod
    def of_run(cls, config: RuntimeConfig) -> Setting:
        """Return that of a run: the steps of its recipe that approximate, the type of its KV cache, and the settings of
        other techniques that do, settled for the model.
        """
        from ..graph import approximates

        steps = [step for step in config.recipe.steps if approximates(step)]
        names = [one.name for one in techniques() if one.by_itself] if steps else []
        if all(step.name in names for step in steps):  # whose order says nothing
            steps.sort(key=lambda step: names.index(step.name))
        others = {one.name: str(settings) for one, settings in each(config.techniques) if not one.exact(settings)}
        return cls.of(kv=config.kv, passes="+".join(map(str, steps)) or "none", **others)

    @property
    def exact(self) -> bool:
        """Whether it has the predictions of the model itself."""
        others = {name: value for name, value in self.values if name != "kv"}
        return others in ({}, {"passes": "none"})

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values)


@dataclass(frozen=True)
class Measurement:
    """Quality loss of a setting, against the same weights without its approximations."""

    setting: Setting
    kld_mean: float
    kld_p99: float
    same_top: float
    perplexity: float
    reference_perplexity: float
    tokens: int
    """Tokens counted."""
    protocol: str
    """Protocol by which the text was fed."""
    text_sha256: str
    """Of the token ids that were fed, as JSON."""
    weights: str
    """Checksum of what the bundle computes with: weights and predictor (`measured_identity`)."""
    isa: str
    version: str = __version__
    text: str = ""
    """Name of the text, for people; empty in files of earlier versions."""

    def __str__(self) -> str:
        return (f"KLD {self.kld_mean:.5f} mean, {self.kld_p99:.4f} for the worst 1 %, over {self.tokens} tokens"
                f"{self.of_text} ({self.protocol}; edgeinfer {self.version}, {self.isa})")

    @property
    def of_text(self) -> str:
        """The words that name its text, with a space before them; empty if the name is not known."""
        return f" of {self.text}" if self.text else ""

    @property
    def subject(self) -> tuple[object, ...]:
        """Key of the measurement: a later one with the same key replaces it."""
        return self.setting, self.weights, self.protocol, self.text_sha256, self.isa


def measurement(setting: Setting, result: Evaluation, weights: str, *, protocol: str, stream: Stream,
                isa: str) -> Measurement:
    """Return the measurement that an evaluation of a text against the exact model is; `weights` as in `Measurement`."""
    divergence = result.divergence
    if divergence is None:
        raise BundleError("A measurement of quality needs a reference; evaluate against the exact model.")
    name = "".join(char if char.isprintable() else "?" for char in stream.name)
    return Measurement(
        setting, divergence.kld_mean, divergence.kld_p99, divergence.same_top, result.perplexity,
        divergence.reference_perplexity, result.tokens, protocol, stream.sha256(), weights, isa, text=name,
    )


def measured_identity(bundle: Bundle) -> str:
    """Return a checksum of all in a bundle that its predictions depend on."""
    from ..bundle import APPROXIMATING, weights_identity

    predictors = [entry.sha256 for entry in bundle.header.files if entry.part in APPROXIMATING]
    return identity(weights_identity(bundle.header.tensors), *predictors)


def identity(weights: str, *predictors: str) -> str:
    """Return the checksum of weights, by `weights_identity`, together with predictors, by their files' checksums."""
    return hashlib.sha256(json.dumps([weights, *predictors]).encode()).hexdigest()


def find(known: Iterable[Measurement], setting: Setting, bundle: Bundle) -> Measurement | None:
    """Return the measurement that decides about a setting of these weights, or None if it was not measured.

    That is the worst: the one with the largest mean divergence, whatever its text. Of several of the same text and
    protocol the last one counts. Those of fewer than `LEAST_TOKENS` count only if there is no other.
    """
    weights = measured_identity(bundle)
    last = {one.subject: one for one in known if one.setting == setting and one.weights == weights}
    return max(last.values(), key=lambda one: (one.tokens >= LEAST_TOKENS, one.kld_mean), default=None)


def objection(known: Iterable[Measurement], setting: Setting, bundle: Bundle, max_kld: float = MAX_KLD) -> str:
    """Return why a setting may not be chosen without being requested; empty if it may."""
    if setting.exact:
        return ""
    if max_kld <= 0:
        return f"--max-kld {max_kld:g} allows none"
    found = find(known, setting, bundle)
    if found is None:
        return f"not measured with {setting}"
    if found.tokens < LEAST_TOKENS:
        return f"measured on {found.tokens} tokens{found.of_text} only; {LEAST_TOKENS} are the least that count"
    if found.kld_mean > max_kld:
        return f"KLD {found.kld_mean:.4f} over {found.tokens} tokens{found.of_text} is above --max-kld {max_kld:g}"
    return ""


class Judged(NamedTuple):
    """Approximations that may be added to a run that did not request them."""

    enabled: tuple[RuntimeConfig, ...]
    """The config with approximations that were measured within the bound, those with the most of them first."""
    switched_off: tuple[str, ...]
    """The flags of others, each with the reason; none of which a part was refused alone."""


def judge(bundle: Bundle, config: RuntimeConfig, max_kld: float = MAX_KLD) -> Judged:
    """Say which approximations a run may use without being asked, and why not the others.

    These are some of those that the bundle has parts for and the recipe says nothing of, where exactly what comes out
    was measured within the bound.

    Raises
    ------
    BundleError
        As `read_quality`.
    """
    said = {step.name for step in config.recipe.steps}
    free = [one for one in techniques()
            if one.by_itself and one.part and one.part.name in bundle.parts and one.name not in said]
    known = read_quality(bundle) if free and max_kld > 0 else []
    within: list[RuntimeConfig] = []
    refused: dict[tuple[Technique, ...], str] = {}
    for some in (some for n in range(1, len(free) + 1) for some in combinations(free, n)):
        options = {one.options[0].name: one.by_itself for one in some}
        found = replace(config, recipe=recipe_with(config.recipe, **options))
        why = objection(known, Setting.of_run(found), bundle, max_kld)
        if not why:
            within.append(found)
        elif not any(set(less) < set(some) for less in refused):
            refused[some] = f"{' '.join(f'{one.options[0].flag} {one.by_itself}' for one in some)} ({why})"
    within.sort(key=lambda one: -len(one.recipe.steps))
    return Judged(tuple(within), tuple(refused.values()))


def of_run(bundle: Bundle, config: RuntimeConfig) -> dict[str, Any] | None:
    """Return what reports say of a run's approximations, or None if it has none.

    Raises `BundleError` as `read_quality`.
    """
    setting = Setting.of_run(config)
    if setting.exact:
        return None
    found = find(read_quality(bundle), setting, bundle)
    return {"setting": dict(setting.values), "kld_mean": None if found is None else found.kld_mean,
            "said": f"{setting}: {'not measured' if found is None else found}"}


# -- where they are kept -----------------------------------------------------------------------------------------------


def read_quality(bundle: Bundle) -> list[Measurement]:
    """Return what is known of a bundle's quality, the newest last: from the bundle itself, then from the cache.

    Raises
    ------
    BundleError
        The bundle's own file is damaged. A file of the cache that cannot be read counts as none.
    """
    known: list[Measurement] = []
    entry = next((entry for entry in bundle.header.files if entry.part == "quality"), None)
    if entry is not None:
        try:
            known += from_json(_read(bundle.path / entry.name))
        except (OSError, ValueError) as error:
            raise BundleError(f"Cannot use the bundle {bundle.path}: its {entry.name} cannot be read ({error}); make "
                              "the bundle again.") from None
    return known + _kept(_cached(bundle))


def remember(bundle: Bundle, made: Measurement) -> None:
    """Keep a measurement in the user's cache; where that cannot be written it is not kept."""
    path = _cached(bundle)
    with contextlib.suppress(OSError):
        make_directories(path.parent)
        with replacement(path) as file:
            file.write(to_json(_most([*_kept(path), made])))


def _most(known: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements that a file keeps: of many the older ones go, but for the worst of each setting."""
    rows = list({one.subject: one for one in known}.values())
    worst = {one.setting: one for one in sorted(rows, key=lambda one: one.kld_mean)}
    spare = [one.subject for one in rows[:-1] if one is not worst[one.setting]]
    gone = set(spare[: max(len(rows) - MOST_KEPT, 0)])
    return [one for one in rows if one.subject not in gone]


def to_json(known: Iterable[Measurement]) -> bytes:
    """Return the text of a file of measurements."""
    rows = [{**asdict(one), "setting": dict(one.setting.values)} for one in known]
    return (json.dumps({"version": 1, "measurements": rows}, indent=1) + "\n").encode()


def from_json(text: bytes) -> list[Measurement]:
    """Return the measurements of a file; raises `ValueError` for anything else."""
    data = parse_json(text, unique=True)
    if not isinstance(data, dict) or data.get("version") != 1 or not isinstance(data.get("measurements"), list):
        raise ValueError("it is not a list of measurements of version 1")
    return [_measurement(row) for row in data["measurements"]]


_KINDS: Mapping[str, type] = {"str": str, "int": int, "float": float}


def _measurement(row: Any) -> Measurement:
    names = {field.name: field.type for field in fields(Measurement)}
    row = {"text": "", **row} if isinstance(row, dict) else row
    if not isinstance(row, dict) or set(row) != set(names) or not isinstance(row["setting"], dict):
        raise ValueError("a measurement lacks a field or has an unknown one")
    values = row["setting"]
    if not all(type(value) is str for value in values.values()):
        raise ValueError("a setting has values that are not text")
    for name, kind in names.items():
        value = row[name]
        if (kind in _KINDS and type(value) is not _KINDS[str(kind)] and not (kind == "float" and type(value) is int)) \
                or (kind == "str" and not value.isprintable()):  # reports print these
            raise ValueError(f"{name} of a measurement is {str(value)[:60]!r}")
        if kind == "float" and not 0 <= value <= sys.float_info.max:  # an integer may be larger than any float
            raise ValueError(f"{name} of a measurement is {str(value)[:60]!r}")
    return Measurement(**{**row, "setting": Setting.of(**values)})


def _kept(path: Path) -> list[Measurement]:
    """Return the measurements in a file of the cache; a file that cannot be read counts as empty."""
    try:
        return from_json(_read(path))
    except (OSError, ValueError):
        return []


def _read(path: Path) -> bytes:
    with open_plain(path) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return text


def _cached(bundle: Bundle) -> Path:
    return cache_root() / "quality" / measured_identity(bundle)[:32] / "measurements.json"
