"""Lookup of devices by the names that people type, and of the amount of memory in such a name.

A name is cut into words and numbers; makers, cases and other words that do not distinguish devices are left out, and so
is an amount of memory. The rest must match exactly: another number, or one more word ("4090 laptop"), is another
device, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.validation import similar
from edgeinfer.errors import UsageError

from .profile import DeviceProfile

_STORAGE = re.compile(r"\b\d+ ?[gt]b (?:ssd|storage|nvme|emmc)\b")
_MEMORY = re.compile(r"(?<![\w.])(\d+) ?(g(?:i?b)?|ti?b)\b")
_SCREEN = re.compile(r"(?<![\w.])1[1-9](?:\.\d)? ?(?:\"|''|-? ?inch\b)")
_WORDS = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_CASES = re.compile(r"\b(?:mac ?book (?:air|pro)|mac (?:mini|studio|pro)|macbook|i ?mac|i ?pad (?:air|pro)|mini|studio|"
                    r"developer kit|dev kit|founders edition|graphics card|model b)\b")
"""Names of products that devices are built into."""
_NOISE = frozenset("apple nvidia geforce amd radeon intel core qualcomm rockchip radxa jetson snapdragon samsung ryzen "
                   "aws amazon with and chip soc board sbc computer of unified ram memory vram processor".split())
"""Words that tell no two devices apart."""
_UNITS = {"cuda": "gpu", "metal": "gpu", "vulkan": "gpu", "sycl": "gpu", "npu": "npu"}
"""Units that a program's language runs on; else the processor."""
Key = tuple[str, ...]
MOST_CHARACTERS = 200
"""Length limit of a name."""


@dataclass(frozen=True)
class Typed:
    """A name as a user typed it, split into parts."""

    words: Key
    """Its words and numbers that matter."""
    memory_gib: int | None
    """The amount of memory that it states."""

    @property
    def key(self) -> Key:
        """The words in no order."""
        return tuple(sorted(self.words))

    @property
    def whole(self) -> Key:
        """The words as one, for some write raspberrypi5."""
        return ("".join(self.words),)


def unit_of(profile: DeviceProfile) -> str:
    """Return on what a device's programs run: gpu, npu or cpu."""
    return _UNITS.get(profile.isa, "cpu")


def unit_in_words(profile: DeviceProfile) -> str:
    """Return the unit as a sentence names it, such as the GPU (Metal)."""
    unit = unit_of(profile)
    language = {"cuda": "CUDA", "metal": "Metal", "vulkan": "Vulkan", "sycl": "SYCL"}.get(profile.isa)
    return f"the {unit.upper()} ({language})" if language else f"the {unit.upper()}"


def taken_apart(text: str) -> Typed:
    """Take a name apart."""
    text = _SCREEN.sub(" ", text[:MOST_CHARACTERS].lower().replace("_", " "))
    text = _STORAGE.sub(" ", re.sub(r"[^\w.]+", " ", text))
    stated = _MEMORY.search(text)
    memory = int(stated[1]) * (1024 if stated[2].startswith("t") else 1) if stated else None
    text = _CASES.sub(" ", _MEMORY.sub(" ", text))
    return Typed(tuple(word for word in _WORDS.findall(text) if word not in _NOISE), memory)


def keys_of(profile: DeviceProfile) -> set[Key]:
    """Return all that a device may be called: by its name, title and aliases, with and without its unit."""
    unit, found = unit_of(profile), set()
    for text in (profile.name, profile.title, *profile.aliases):
        for typed in (taken_apart(text), taken_apart(f"{text} {unit}")):
            found |= {typed.key, typed.whole}
    return found - {(), ("",), (unit,)}


def with_memory(profile: DeviceProfile, stated: int) -> DeviceProfile:
    """Return a device with the memory that its name states.

    Raises
    ------
    UsageError
        It does not exist with so much.
    """
    most, known = profile.memory_bytes >> 30, profile.memory_gib
    if stated not in known if known else stated > most:
        exist = f"exists with {_either(known)} GB" if known else f"has at most {most} GB"
        raise UsageError(f"{profile.title} ({profile.name}) {exist}, not with {stated} GB; leave the memory out, or "
                         "give a profile of your own as a TOML file.")
    title = profile.title if f"{stated} GB" in profile.title else f"{profile.title}, {stated} GB"
    return replace(profile, memory_bytes=stated << 30, memory_gib=(stated,), title=title)


def nearest(typed: Typed, known: Mapping[Key, str]) -> str:
    """Return a hint for a name that is not a device's: near spellings, else those of its kind, which are others."""
    words = {" ".join(key): name for key, name in known.items() if len(key) > 1}
    near = similar(" ".join(typed.key), words, n=8, cutoff=0.6)
    same = [words[word] for word in near if _same_spelt_otherwise(word.split(), typed.key)]
    if typed.key and not _numbers(typed.key):  # a part of a name, such as "orange pi"
        same += [name for key, name in known.items() if set(typed.key) < set(key)]
    if names := list(dict.fromkeys(same))[:3]:
        return f"did you mean {' or '.join(repr(name) for name in names)}?"
    if names := list(dict.fromkeys(words[word] for word in near))[:3]:
        return (f"the names next to it, {_either(map(repr, names))}, are other devices'. 'edgeinfer devices' lists the "
                "known ones, and a TOML file describes yours.")
    return "'edgeinfer devices' lists the known ones, and a TOML file is given by its path."


def _same_spelt_otherwise(words: list[str], typed: Key) -> bool:
    """Whether two names have the same numbers, and letters that differ by a slip: 4090 laptop is not an rtx 4090."""
    import difflib

    letters = ["".join(word for word in name if not word[0].isdigit()) for name in (words, typed)]
    return _numbers(words) == _numbers(typed) and difflib.SequenceMatcher(None, letters[0], letters[1]).ratio() > 0.6


def _numbers(words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if word[0].isdigit())


def _either(items: Iterable[object]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} or {last}" if first else last
