"""Measurements of quality: the setting that each belongs to, and the files that keep them.

They are in the bundle (part ``quality``) or in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..base.cache_dir import cache_root, make_directories
from ..base.dataclass import dataclass
from ..base.files import open_plain, replacement
from ..base.strict_json import parse_json
from ..config import RuntimeConfig
from ..errors import BundleError
from ..registry import each, techniques
from .evaluate import Evaluation, Stream

if TYPE_CHECKING:
    from ..bundle import Bundle

MIN_TOKENS = 100
"""A mean over fewer tokens says too little to enable anything."""
QUALITY_FILE = "quality.json"
MAX_BYTES = 1 << 20
MAX_KEPT = 1000
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
        """True if it has the predictions of the model itself."""
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
    """Hash of the token ids that were fed, as JSON."""
    weights: str
    """Checksum of the weights and predictor that the bundle computes with (`measured_identity`)."""
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
    """Return a checksum of everything in the bundle that affects its predictions."""
    from ..bundle import APPROXIMATING, weights_identity

    predictors = [entry.sha256 for entry in bundle.header.files if entry.part in APPROXIMATING]
    return identity(weights_identity(bundle.header.tensors), *predictors)


def identity(weights: str, *predictors: str) -> str:
    """Return the checksum of weights, by `weights_identity`, together with predictors, by their files' checksums."""
    return hashlib.sha256(json.dumps([weights, *predictors]).encode()).hexdigest()


# -- where they are kept -----------------------------------------------------------------------------------------------


def read_quality(bundle: Bundle) -> list[Measurement]:
    """Return the measurements of a bundle's quality, the newest last: from the bundle itself, then from the cache.

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
    gone = set(spare[: max(len(rows) - MAX_KEPT, 0)])
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
