"""Names that say more than which device it is: its kind, its cores, its maker, or the computer that it is built into.

Each of these is left out only where it agrees with the device that the rest names: a "5700U laptop" is the processor of
a laptop, a "9950X 16-Core Processor" has 16 cores, and the graphics card of a laptop is not that of a desktop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from .names import AMOUNT, Key, Typed, plain, taken_apart
from .profile import DeviceProfile

Called = Callable[[Key], list[DeviceProfile]]
Allowed = Callable[[DeviceProfile], bool]
CARDS = ("cuda-consumer", "cuda-datacentre", "radeon", "arc")
_LAPTOPS = ("x86-laptop", "arm-laptop", "apple-gpu", "igpu")
_PHONES = ("arm-phone", "apple-cpu")
_X86 = ("x86-desktop", "x86-laptop", "x86-server")
_KINDS = {
    **dict.fromkeys(("laptop", "notebook", "ultrabook", "handheld", "ultraportable", "mobile"), _LAPTOPS),
    "card": CARDS,
    **dict.fromkeys(("phone", "smartphone", "tablet", "android"), _PHONES),
    **dict.fromkeys(("desktop", "pc", "workstation"), ("x86-desktop", "x86-server", "igpu", *CARDS)),
    **dict.fromkeys(("server", "vm", "instance"), ("x86-server", "arm-server", "cuda-datacentre")),
    **dict.fromkeys(("board", "devkit", "kit"), ("arm-sbc", "cuda-embedded", "npu")),
}
"""Classes of the devices that a word names as a kind."""
_MAKERS = {
    "apple": ("apple",), "nvidia": ("cuda", "arm-server"), "geforce": ("cuda",),
    "radeon": ("radeon", "igpu", "x86-laptop", "x86-desktop"),
    "ryzen": ("x86", "igpu", "radeon"), "amd": ("x86", "igpu", "radeon"), "intel": ("x86", "igpu", "arc", "npu"),
    **dict.fromkeys(("samsung", "galaxy", "xiaomi", "redmi", "google", "mediatek", "huawei", "motorola", "oppo"),
                    ("arm", "npu", "x86-laptop")),
}
"""Beginnings of the classes that a maker's name allows."""
_OF_AMD = re.compile(r"ryzen|amd|epyc|threadripper|athlon|steam deck|strix|radeon|instinct|\bmi\d|\brx\b", re.I)
_CORES = re.compile(r"\b(\d{1,3}) ?(?:cores\b|core\b(?! (?:ultra|[im]? ?[3579]\b)))(?: processor| cpu)?|"
                    r"\b(\d{1,3})c ?\d{1,3}t\b")
_OF_CARDS = re.compile(
    r"\b(?:evga|msi|gigabyte|zotac|pny|palit|gainward|inno3d|sapphire|powercolor|xfx|asrock|colorful|igame|kfa2|galax|"
    r"maxsun|yeston|sparkle|gunnir|leadtek|biostar|asus|rog|tuf|strix|aorus(?: master| elite| xtreme)?|oem|"
    r"(?:ftw|xc)(?: ?3)?(?: ultra| black| hybrid)?|gaming(?: x)?(?: trio)?|x trio|trio|oc|windforce|eagle|"
    r"ventus(?: [23]x)?|suprim(?: x)?|nitro(?: plus)?|pulse|red devil|hellhound|twin edge|amp|dual|phoenix|phantom|"
    r"mech|merc(?:ury)? ?\d*|quicksilver|(?<=xfx )swift|speedster|swft ?\d*|qick ?\d*|challenger|steel legend|"
    r"taichi|pure|fighter|verto|gamerock|"
    r"gaming ?pro|python(?: iii)?|ichill|ghost|dual fan|workstation|"
    r"(?:acer )?(?:predator )?bifrost|founders|trinity|xlr ?8|vapor x|titan oc|sc|ko|hof|epic x|oam|"
    r"jetstream|blower|infinity(?: \d)?|ultra (?:w )?oc|reference|limited edition|"
    r"(?:black |white )?edition|gddr\d?x?|hbm\d?e?|pcie|sxm\d?|le|x[23]|"
    r"low profile|"
    r"pascal|volta|turing|ampere|lovelace|hopper|blackwell|kepler|maxwell|rdna ?\d?|battlemage|alchemist)\b")
"""Makers and series of graphics cards, and further words on their boxes."""
_BOARD_PARTNERS = re.compile(
    r"\b(?:evga|msi|gigabyte|zotac|pny|palit|gainward|inno3d|sapphire|powercolor|xfx|asrock|colorful|kfa2|galax|manli|"
    r"maxsun|yeston|sparkle|gunnir|leadtek|biostar|asus)\b")
_NAMES_OF_CARDS = frozenset("rtx gtx rx arc radeon geforce titan quadro".split())
_COMPUTERS = frozenset(
    "lenovo thinkpad thinkcentre thinkstation thinkbook ideapad ideacentre yoga legion loq dell xps inspiron "
    "latitude precision optiplex alienware vostro hp elitebook elitedesk probook prodesk pavilion envy omen "
    "victus spectre zbook asus zenbook vivobook rog tuf proart zephyrus nuc acer aspire swift predator nitro msi "
    "stealth katana raider framework surface microsoft razer blade huawei matebook honor magicbook redmibook lg "
    "gram beelink minisforum gmktec geekom topton aoostar acemagic chuwi gpd ayaneo onexplayer system76 tuxedo "
    "medion fujitsu toshiba chromebook banana bpi friendlyelec firefly mixtile coolpi khadas".split())
"""Makers and series of computers and boards."""
_OF_MEMORY = re.compile(
    r"\b(?:lp)?ddr[345]x?(?: \d{4})?\b|\b(?:dual|quad|hexa|octa|\d{1,2}) ?channels?\b|"
    r"\b(?:coffee|comet|kaby|ice|tiger|rocket|alder|raptor|meteor|arrow|lunar|cascade|twin|panther) lake(?: n\b)?|"
    r"\b(?:sky|kaby)lake\b|"
    r"\b(?:sapphire|emerald|granite) rapids\b|\b(?:haswell|broadwell|renoir|cezanne|rembrandt|phoenix|vermeer|matisse|"
    r"raphael|naples|rome|milan|genoa|turin)\b|\b(?:hawk|strix|krackan|dragon) point\b|\bzen ?[1-5]\b")
_OF_GRAPHICS = re.compile(r"\b(?:intel )?(?:arc|iris(?: xe| plus)?|u?hd)(?: graphics)?(?: \d{3})?\b")
"""Graphics in Intel's processors, as tools that list hardware name them beside the processor."""
_ENDINGS = re.compile(r"(?<=\d{3}k)[fs]\b|(?<=\d{4})f\b|(?<=\b[79]\d{3})p\b")
"""Memory and code names beside a processor; endings of those without graphics, with a higher clock or one socket."""
_LITTLE = frozenset("de di da do du le la el un en et und der die das mit con avec com the my for on in y".split())
_PLUS = re.compile(r"\bplus\b")
_OF_CLOUDS = re.compile(r"\b[a-z]\d[a-z]{0,3}\.(?:\d*x?large|metal|medium|micro|small|nano)\b|\b[a-z]\d[a-z]? "
                        r"(?:standard|high(?:gpu|mem|cpu)|(?:mega|ultra)gpu) \d+\b")
_TIERS = frozenset("lite neo duo micro sff fold flip note tab watch embedded refresh turbo prime active play power "
                   "zoom fusion edge classic nano zero mini fe mod modded modified".split())
"""Words that may tell devices apart of which none is known."""
_OF_PHONES = re.compile(r"\b[45]g\b|\blte\b")
_VARIANTS = frozenset("ti super xt xtx gre laptop mobile notebook max q d ada sff pro v xe ultra".split())
"""Words that tell cards apart."""
_ACCESSORIES = re.compile(r"\b(?:with|mit|avec|con|m\.2|nvme|ssd|hat|case|kit|cooler|starter|bundle|set|pack)\b")
_SEVERAL = re.compile(r"\b(?:dual|two|triple|quad|[248][sp]|[248] ?x|x ?[248])\b")
_OF_PARTS = re.compile(r"\b(?:rk\d{4}s?|sm\d{4}|graviton ?\d)\b")
_SPECIFIC, _UNKNOWN = 5, 3
"""Characters of a name that may stand among unknown words, and letters of these; those of other scripts count as such.
"""
_LONGEST = 6
"""Words of a device's name."""
_SHORT = 4
"""Characters that a device's name needs in that of a computer: a Surface with a Core m3 is not an Apple M3."""


def within(text: str, called: Called, vocabulary: Callable[[], Container[str]]
           ) -> tuple[Typed, list[DeviceProfile]]:
    """Return the devices that a name means that says more, and the name without that; none if it means none.

    Parameters
    ----------
    text : as it was typed
    called : returns the devices of a name that was taken apart
    vocabulary : returns the words in names of devices
    """
    clean, cores = plain(text), 0
    if stated := _CORES.search(clean):
        clean, cores = _CORES.sub(" ", clean), int(stated[1] or stated[2])

    def shorter(clean: str, least: int = 1) -> tuple[Typed, list[DeviceProfile]] | None:
        for typed, allowed in ((taken_apart(clean), lambda profile: True), *_shorter(clean)):
            if len(typed.whole[0]) < least or (least > 1 and typed.whole[0].isdigit()):
                continue
            found = called(typed.key) or called(typed.whole)
            if found := [one for one in of_their_makers(text, found) if allowed(one) and cores in (0, *_cores_of(one))]:
                return typed, found
        return None

    if found := shorter(clean):
        return found
    typed = taken_apart(clean)
    inside = _said_twice(typed.words, called)
    if not inside and not _SEVERAL.search(_OF_MEMORY.sub(" ", clean)):
        inside = _inside(clean, called) or _in_a_computer(clean, called)
    inside = [one for one in {one.name: one for one in inside}.values() if cores in (0, *_cores_of(one))]
    if len(inside) == 1:  # of several the maker of one is said
        inside = of_their_makers(text, inside)
    rest = "" if inside else _without_unknown(clean, vocabulary())
    return (rest and shorter(rest, _SPECIFIC)) or (typed, inside)


def _without_unknown(clean: str, vocabulary: Container[str]) -> str:
    """Return a name without words that no device has, which tell none apart; empty if there is none of them.

    A model of a computer has numbers of its own, so its name is left as it is.
    """
    words = clean.split()
    kept = [word for word in words if word not in _LITTLE and (
        not word.isalpha() or (len(word) < _UNKNOWN and word.isascii()) or word in vocabulary or word in _TIERS
        or word in _KINDS)]
    return "" if kept == words or not _COMPUTERS.isdisjoint(words) else " ".join(kept)


def _inside(clean: str, called: Called) -> list[DeviceProfile]:
    """Return the processor whose number stands in a name, whatever else it says; all devices if it has several.

    The longest run of words that is a device's name counts. A number and a letter that hang together are one word, so
    that an i7-12700HX is no i7-12700, and a version after it ("v9") must be part of the name.
    """
    for left_out in (_OF_MEMORY, _OF_GRAPHICS, AMOUNT):
        clean = left_out.sub(" ", clean)
    words, found, computers, i = clean.split(), list[DeviceProfile](), list[DeviceProfile](), 0
    while i < len(words):
        for end in range(min(len(words), i + _LONGEST), i, -1):
            run = " ".join(words[i:end])
            typed = taken_apart(run)
            if len(typed.whole[0]) >= _SHORT and re.search(r"[a-z]", run) and called(typed.key) and (
                    re.search(r"\d{3}", run) or _OF_PARTS.fullmatch(run)):
                kind = computers if words[i] in _COMPUTERS else found
                kind += called(typed.key)
                i = end - 1
                if end < len(words) and re.fullmatch(r"v\d|x3d|[a-z]", words[end]):
                    return []
                break
        i += 1
    parts, found = _OF_PARTS.search(clean), found or computers  # the processor that is said, not the usual one
    return found if any(one.device_class in (*_X86, "arm-server") or parts for one in found) else []


def _said_twice(words: Key, called: Called) -> list[DeviceProfile]:
    """Return the devices of which two names follow each other, such as a name and the number of the part."""
    for i in range(1, len(words)):
        first = called(tuple(sorted(words[:i])))
        if same := [one for one in called(tuple(sorted(words[i:]))) if one in first]:
            return same
    return []


def of_their_makers(text: str, found: Iterable[DeviceProfile]) -> list[DeviceProfile]:
    """Return those of some devices that contradict no maker in a name: a Samsung A15 is not an Apple A15."""
    said = {word for word in re.findall(r"[a-z]+", text.lower()) if word in _MAKERS}

    def fits(profile: DeviceProfile) -> bool:
        amd = bool(_OF_AMD.search(f"{profile.name} {profile.title}"))
        if "ryzen" in said and profile.title.startswith("Radeon"):
            return False
        return (all(profile.device_class.startswith(_MAKERS[word]) for word in said)
                and not (amd and "intel" in said) and not (not amd and {"amd", "ryzen", "radeon"} & said))

    return [profile for profile in found if fits(profile)]


def _shorter(clean: str) -> Iterator[tuple[Typed, Allowed]]:
    """Yield names without optional words, each with the devices that allow it."""
    typed = taken_apart(clean)
    kinds = [_KINDS[word] for word in typed.words if word in _KINDS]
    words = tuple(word for word in typed.words if word not in _KINDS)

    def of_kind(profile: DeviceProfile) -> bool:
        return all(profile.device_class in kind for kind in kinds)

    yield replace(typed, words=words), of_kind
    card = taken_apart(_OF_CARDS.sub(" ", clean))
    yield (replace(card, words=tuple(word for word in card.words if word not in _KINDS)),
           lambda profile: _is_card(profile) and of_kind(profile))
    if _BOARD_PARTNERS.search(clean):
        said = [word for word in _OF_CARDS.sub(" ", clean).split()
                if re.search(r"\d", word) or word in _VARIANTS or word in _COMPUTERS or word in _NAMES_OF_CARDS]
        partner = taken_apart(" ".join(said))
        yield partner, lambda profile: _is_card(profile) and "laptop" not in profile.name and of_kind(profile)
    kept = clean
    for left_out, classes in ((_OF_MEMORY, _X86), (_OF_GRAPHICS, _X86), (_ENDINGS, ("x86-desktop", "x86-server")),
                              (_PLUS, (*_X86, "igpu", "radeon")),
                              (_OF_CLOUDS, ("arm-server", "x86-server", "cuda-datacentre")),
                              (_ACCESSORIES, ("arm-sbc", "riscv-sbc", "cuda-embedded")), (_OF_PHONES, _PHONES)):
        if left_out.search(clean):
            kept = left_out.sub(" ", kept)
            for text in dict.fromkeys((left_out.sub(" ", clean), kept)):  # one alone, and with those before it
                rest = taken_apart(text)
                yield (replace(rest, words=tuple(word for word in rest.words if word not in _KINDS)),
                       partial(_of_class, classes))
    for i, word in enumerate(words):
        if typed.memory_gib is None and word.isdigit() and 2 <= (gib := int(word)) <= 1024:  # "m4 max 128"
            yield Typed((*words[:i], *words[i + 1:]), gib), partial(_with_gib, gib, of_kind)


def _is_card(profile: DeviceProfile) -> bool:
    return profile.device_class in CARDS


def _of_class(classes: Sequence[str], profile: DeviceProfile) -> bool:
    return profile.device_class in classes


def _with_gib(gib: int, of_kind: Allowed, profile: DeviceProfile) -> bool:
    return of_kind(profile) and gib in (*profile.memory_gib, profile.memory_bytes >> 30)


def _cores_of(profile: DeviceProfile) -> tuple[int, int]:
    return profile.cores, sum(number for number, _ in profile.processor.values())


def _in_a_computer(clean: str, called: Called) -> list[DeviceProfile]:
    """Return the device that the name of a computer ends, or begins, with; all if it has several."""
    words = [*taken_apart(clean).words]
    brands = [i for i, word in enumerate(re.findall(r"\d+(?:\.\d+)?|[^\W\d_]+", clean)) if word in _COMPUTERS]
    if not brands:
        return []
    words = [word for word in words if word not in _KINDS and word not in _COMPUTERS]
    runs = [words[i:] for i in range(len(words))] if brands[0] == 0 else [words[:i] for i in range(len(words), 0, -1)]
    for run in runs:
        found = _of(run, called)
        if found and len("".join(run)) >= _SHORT:
            others = words[:-len(run)] if brands[0] == 0 else words[len(run):]
            return [*found, *_further(others, called)]
    return []


def _of(run: Sequence[str], called: Called) -> list[DeviceProfile]:
    """Return the devices of some words in the name of a computer: of cards those for laptops, and no Macs."""
    found = called(tuple(sorted(run)))
    if any(map(_is_card, found)):
        found = called(tuple(sorted((*run, "laptop"))))
    return [one for one in found if not one.device_class.startswith("apple")]


def _further(words: Sequence[str], called: Called) -> list[DeviceProfile]:
    """Return the devices that the other words of a computer's name mean, too."""
    for n in range(len(words), 1, -1):
        for i in range(len(words) - n + 1):
            if len("".join(words[i:i + n])) >= _SHORT and (found := _of(words[i:i + n], called)):
                return found
    return []
