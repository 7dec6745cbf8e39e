"""From a name as people type it to a device, without making the profiles of all devices that it cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path

from edgeinfer.errors import UsageError

from .kinds import kind_of
from .known import all_rows, by_own_name
from .names import (
    AMOUNT,
    UNITS,
    Key,
    Typed,
    cheap_key,
    meant,
    nearest,
    one_memory,
    one_script,
    plain,
    taken_apart,
    unit_of,
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
_CHANNELS = r"(?:dual|two|2)[ -]?channels?"
_MEMORY = re.compile(rf"(?i)\s*(?:{_CHANNELS} )?ddr[345][ -]?(\d{{4}})(?: {_CHANNELS})?\s*")
"""Memory of a computer, in two channels if it says how many."""
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
    typed, called = taken_apart(text), partial(_called, {*_NUMBERS.findall(plain(text)), *_NUMBERS.findall(text)})
    exact = called(typed.key) or called(typed.whole)
    found = of_their_makers(text, exact)
    if not exact:
        typed, found = within(text, called, _vocabulary)
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
    if memory := _MEMORY.fullmatch(text):
        gbs = 16 * int(memory[1]) / 1000
        return UsageError(f"There is no device {text!r}, which is memory; two channels of it have {gbs:g} GB/s, so "
                          f"describe the computer: '--bandwidth {gbs:g}', '--cores 8' and '--class desktop'.")
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


def _called(numbers: set[str], key: Key) -> list[DeviceProfile]:
    """Return the devices of a name that was taken apart; a few names are those of several.

    One name of each has no numbers but those typed: its key may leave some out, as of an iPhone SE the year.
    """
    found = {one.name: one for one in _of_words(key)}
    for unit in UNITS:  # "m4 gpu", or "m4gpu"
        at = key.index(unit) if unit in key else len(key)
        rest = (*key[:at], *key[at + 1:]) if len(key) > 1 else (key[0].removesuffix(unit),) if key else ()
        if rest != key:
            found |= {one.name: one for one in _of_words(rest) if unit_of(one) == unit}
    return [one for one in found.values() if any(said <= numbers for said in _numbers(one))]


def _of_words(words: Key) -> list[DeviceProfile]:
    return [found for name in _names().get(" ".join(words), "").split() if (found := by_own_name(name))]


@cache
def _names() -> dict[str, str]:
    """Return the devices of all names; ``python -m tests.make_device_names`` takes the names apart."""
    return dict(json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8")))


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


def names_of(name: str, title: str, aliases: Iterable[str]) -> tuple[str, ...]:
    """Return all names of a device as they are written."""
    return name, title, *aliases, *_other_names().get(name, ())


def _numbers(profile: DeviceProfile) -> set[frozenset[str]]:
    """Return the numbers in each name of a device, amounts of memory left out."""
    return {frozenset(_NUMBERS.findall(AMOUNT.sub("", said.lower())))
            for said in names_of(profile.name, profile.title, profile.aliases)}


def _all_names() -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """Yield every device, whether it is listed, and its names."""
    for name, (path, row) in all_rows().items():
        yield name, path.parent.name == "profiles", names_of(name, row["title"], row.get("aliases", ()))


@cache
def _vocabulary() -> frozenset[str]:
    """Return the words in names of devices."""
    return frozenset(_LETTERS.findall(" ".join(said for _, _, names in _all_names() for said in names).lower()))


def _near(typed: Typed) -> dict[Key, str]:
    """Return names that may be meant: of listed devices, and of processors whose numbers begin like one."""
    begins = tuple(word[:3] for word in typed.words if word.isdigit() and len(word) > 2)
    return {cheap_key(said): name for name, listed, names in _all_names() for said in names
            if listed or any(number.startswith(begins) for number in _NUMBERS.findall(said))}
