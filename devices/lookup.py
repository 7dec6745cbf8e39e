"""From a name as people type it to a device, without making the profiles of all devices that it cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from edgeinfer.errors import UsageError

from .kinds import kind_of
from .known import all_rows, profile_of
from .names import (
    AMOUNT,
    Key,
    Typed,
    cheap_key,
    keys_of,
    meant,
    nearest,
    one_memory,
    one_script,
    plain,
    taken_apart,
    with_memory,
)
from .profile import DeviceProfile
from .spellings import of_their_makers, within

_NUMBERS = re.compile(r"\d+")
_LETTERS = re.compile(r"[^\W\d_]+")
_COUNT = r"(?<=\w)(?:[\s(]*[*×]|[\s(-]+x|(?<=\d)x)[\s-]*([2-9]|[1-9]\d)\s*\)?\s*$"
_COUNTED = re.compile(rf"(?i){_COUNT}")
_SEVERAL = re.compile(rf"(?i)^\s*(?:(?:dual|two|triple|quad|2s)\b|\d{{1,2}} ?[x×*](?=\s*\w))|{_COUNT}")
"""Number of devices, at the beginning or the end of a name: dual EPYC 9175F, 2x 3090, 4xH100, RTX 3090 x2."""
_COUNTED_IN_WORDS = re.compile(
    r"(?i)^\s*(?:(?:a )?(?:pair|couple) of|zwei|drei|vier|deux|trois|quatre|dos|tres|cuatro|due|tre|quattro|duas|dois|"
    r"дв[ае]|три|четыре)\s|^\s*[两兩双雙二三四][张張块塊路枚]?|\b(?:sli|crossfirex?)\b")
"""Likewise in words that are in no device's name; "Dual" is in those of ASUS's cards."""
_ONLY_A_COUNT = re.compile(r"\s*\d{1,2}\s*[x×*]\s*")
_SHORTEST = 2
"""Letters and digits of a name: one alone is a slip, no Snapdragon X."""


def of_any_name(text: str) -> DeviceProfile | None:
    """Return the device of a name, with the memory that the name states; None if it is no device's.

    Raises
    ------
    UsageError
        It is the name of several devices or counts them, or the device does not exist with that memory.
    """
    text = one_script(text)
    if sum(map(str.isalnum, text)) < _SHORTEST or _ONLY_A_COUNT.fullmatch(text):
        return None
    if counted := _COUNTED.search(text):
        one = _single(_COUNTED.sub(" ", text))
        if one and one.device_class.startswith("x86-") and one.cores <= int(counted[1]) <= 2 * one.cores:
            return one  # as desktops show a processor and its threads; of boards people count machines
        if several := _several(text):
            raise several
    if _COUNTED_IN_WORDS.search(text) and (several := _several(text, _COUNTED_IN_WORDS)):
        raise several
    typed, known = taken_apart(text), _candidates(text)
    names = _index(known)
    exact = [known[name] for name in names.get(typed.key) or names.get(typed.whole) or ()]
    found = of_their_makers(text, exact)
    if not exact:
        typed, found = within(text, names, known, _vocabulary)
    if not found:
        return None
    one, stated = one_memory(meant(typed, text, found), text), typed.memory_gib
    sold = _product_memory().get(typed.key)
    return with_memory(one, sold if sold in one.memory_gib and stated not in one.memory_gib else stated)


def no_device(text: str) -> UsageError:
    """Return the message for a name that is no device's: near names, or for that of a kind three of it."""
    if not text.strip():
        return UsageError("The name of the device is empty; give one, such as 'm4', 'rtx4090' or 'rpi5'; 'edgeinfer "
                          "devices' lists them.")
    if kind := kind_of(one_script(text)):
        return UsageError(f"There is no device {text!r}, which is a kind of them; write the model, such as "
                          f"{kind[0]!r}, {kind[1]!r} or {kind[2]!r}.")
    typed = taken_apart(one_script(text))
    return _several(text) or UsageError(f"There is no device {text!r}; {nearest(typed, _near(typed))}")


def _several(text: str, count: re.Pattern[str] = _SEVERAL) -> UsageError | None:
    """Return the message for a name that counts devices; None if it does not, or if it counts anything else."""
    if (single := count.sub(" ", text)) == text:
        return None
    if (one := _single(single)) is None:
        return None
    return UsageError(f"{text!r} is several devices of the name {one.name!r} ({one.title}), and a profile is of one; "
                      f"take {one.name!r}, or describe all of them as one with '--bandwidth', '--cores' and '--class'.")


def _single(text: str) -> DeviceProfile | None:
    """Return the device of a name; None if it is none's, or that of several."""
    try:
        return of_any_name(text)
    except UsageError:
        return None


@cache
def _other_names() -> dict[str, tuple[str, ...]]:
    """Return names of computers and phones, and further ones of devices, by the device that is in them."""
    path = Path(__file__).with_name("other_names.json")
    return {name: tuple(others) for name, others in json.loads(path.read_text(encoding="utf-8")).items()}


@cache
def _product_memory() -> dict[Key, int]:
    """Return the memory, in GiB, of phones and tablets that are sold with one amount, by their names."""
    table = json.loads(Path(__file__).with_name("product_memory.json").read_text(encoding="utf-8"))
    return {taken_apart(product).key: int(gib) for gib, products in table.items() for product in products}


def _said(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return name, row["title"], *row.get("aliases", ()), *_other_names().get(name, ())


@cache
def _vocabulary() -> frozenset[str]:
    """Return the words in names of devices."""
    return frozenset(_LETTERS.findall(" ".join(said for name, (_, row) in all_rows().items()
                                               for said in _said(name, row)).lower()))


@cache
def _numbers() -> dict[str, tuple[frozenset[str], ...]]:
    """Return the numbers in each name of each device, amounts of memory left out."""
    return {name: tuple({frozenset(_NUMBERS.findall(AMOUNT.sub("", said.lower()))) for said in _said(name, row)})
            for name, (_, row) in all_rows().items()}


def _candidates(text: str) -> dict[str, DeviceProfile]:
    """Return the devices with at least one name all of whose numbers occur in the text."""
    numbers, rows = {*_NUMBERS.findall(plain(text)), *_NUMBERS.findall(text)}, all_rows()
    return {name: profile_of(rows[name][0], name) for name, needed in _numbers().items()
            if any(one <= numbers for one in needed)}


def _index(known: Mapping[str, DeviceProfile]) -> dict[Key, tuple[str, ...]]:
    """Devices by all that they may be called; a few names are those of several."""
    found: dict[Key, tuple[str, ...]] = {}
    for name in known:
        for key in _keys(name):
            found[key] = (*found.get(key, ()), name)
    return found


@cache
def _keys(name: str) -> frozenset[Key]:
    return frozenset(keys_of(profile_of(all_rows()[name][0], name), _other_names().get(name, ())))


def _near(typed: Typed) -> dict[Key, str]:
    """Return names that may be meant: of listed devices, and of processors whose numbers begin like one."""
    begins = tuple(word[:3] for word in typed.words if word.isdigit() and len(word) > 2)

    def names() -> Iterator[tuple[str, str]]:
        for name, (path, row) in all_rows().items():
            listed = path.parent.name == "profiles"
            for said in _said(name, row):
                if listed or any(number.startswith(begins) for number in _NUMBERS.findall(said)):
                    yield said, name

    return {cheap_key(said): name for said, name in names()}
