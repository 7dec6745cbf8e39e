"""Lookup of devices by the names that people type, and of the amount of memory in such a name.

A name is cut into words and numbers; makers, cases and other words that do not distinguish devices are left out, and so
is an amount of memory. The rest must match exactly: another number, or one more word ("4090 laptop"), is another
device, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.validation import similar
from edgeinfer.errors import UsageError

from .profile import DeviceProfile

_STORAGE = re.compile(r"\b\d+ ?[gt]b (?:ssd|storage|nvme|emmc)\b")
AMOUNT = re.compile(r"(?<![\w.])(\d{1,4}) ?(gi?b|ti?b)\b|(?<![\w.])([1-46-8]|1[0-268]|2[0-4]|32|36|4[08]|64|"
                     r"80|96|128|192|256|512) ?g\b")
_GENERATION = re.compile(r"\b1\dth gen\b")
_SCREEN = re.compile(r"(?<![\w.])(?:1[1-9]|2[47])(?:\.\d)? ?(?:\"|''|-? ?(?:inch|zoll|pouces|pulgadas)\b)")
_PLUS = re.compile(r"(?<=\w)\+(?!\w)")
_WORDS = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_CASES = re.compile(r"\b(?:mac ?book (?:air|pro|neo)(?: 1[3-6])?|mb[ap](?: 1[3-6])?|mac (?:mini|studio|pro)|macbook|"
                    r"i ?mac(?: 2[47])?|mac|i ?pad (?:air|pro)(?: 1[13]| 12\.9| 10\.5)?|mini pc|"
                    r"(?<!pad )(?<!board )mini|studio|"
                    r"developer kit|dev kit|founders edition|(?<=\d{4} )fe|(?<=ti )fe|(?<=super )fe|"
                    r"graphics card|model [ab])\b")
"""Names of products that devices are built into."""
_NOISE = frozenset("apple nvidia geforce amd radeon intel core qualcomm rockchip radxa jetson snapdragon samsung ryzen "
                   "aws amazon with and chip soc board sbc computer of unified ram memory vram processor valve asus "
                   "google mediatek graphics used new kaggle colab runpod gcp azure oracle ec2 hetzner vastai".split())
"""Words that tell no two devices apart."""
_REWRITTEN = (
    (re.compile(r"\((?:r|tm|c)\)|[®™©]"), " "),
    (re.compile(r"^\W*(?:gpu ?)?\d\W+(?=nvidia|tesla|quadro)|\(uuid[^)]*\)|\b(?:off|on|wddm|tcc)\W*$"), " "),
    (re.compile(r"(?<![\w.])([468]|1[268]|24|32|36|48|64|96) ?(?:gb?)? ?[/+] ?"
                r"(?:(?:128|256|512|1024) ?(?:gb?)?|\d ?tb?)(?!\w)"), r"\1gb "),
    (re.compile(r"\b\d\d?(?:[- ]core|c)[- ](?:cpu)?[- ,/&+]*(?:and )?(?=\d\d?(?:[- ]core|c)[- ]gpu\b)"), " "),
    (re.compile(r"@? ?~?\b\d+(?:[.,]\d+)? ?[gm]hz\b|\b\d{1,3} ?(?:threads?|cpus|threads? cpu)\b|\b\d{1,2} ?nm\b|"
                r"\b\d{2,3} ?w\b(?!/)|\b\d{3,6} ?mi?b\b"), " "),
    (re.compile(r"(?<=\d) ?(?:kernen?|c(?:œ|oe)urs?|n[úu]cleos|コア|核)"), " cores"),
    (re.compile(r"pc portable|ordinateur portable|\bportable\b|port[áa]til\b|\bnotebook\b|笔记本(?:电脑)?|筆電|ноутбук|"
                r"노트북|ノート(?:pc|パソコン|ブック)?"), " laptop "),
    (re.compile(r"(?<=\d) ?(?:go|gigs?|гб|ギガ)\b"), " gb"),
    (re.compile(r"\b(i ?pad pro\b.*?)(?<![\w.])[12] ?tb\b"), r"\1 16gb "),
    (re.compile(r"\b(i ?pad pro\b.*?\bm5\b.*?)(?<![\w.])(?:256|512) ?gb\b"), r"\1 12gb "),
    (re.compile(r"(?<=\barc 1[34]0[vt])( gpu)? ?\(\d+ ?gb\)"), r"\1"),
    (re.compile(r"\b((?:i ?pad|mac ?book|mac mini|i ?mac|mb[ap])\b.*?)(?<![\w.])(?:(?:256|512) ?gb|[1248] ?tb)\b|"
                r"\b(i ?pad\b.*?)(?<![\w.])(?:64|128) ?gb\b|\b(mac (?:studio|pro)\b.*?)(?<![\w.])[1248] ?tb\b"),
     r"\1\2\3 "),
    (re.compile(r"\bgh200 480 ?gb\b"), "gh200"),
    (re.compile(r"\bmac ?book (?=\S+ air\b)"), "macbook air "),
    (re.compile(r"(?<=\bm\d )air\b"), " "),
    (re.compile(r"(?<=\bmacbook air )(\S+) air\b"), r"\1"),
    (re.compile(r"(?<=[a-z0-9])(?=[^\x00-\u024f])|(?<=[^\x00-\u024f])(?=[a-z0-9])"), " "),
    (re.compile(r"\blaptop\b(?=.*\blaptop\b)|\bd['’]occasion\b"), " "),
    (re.compile(r"\bmoto (?=edge|razr)"), "motorola "),
    (re.compile(r"\bw/"), "with "),
    (re.compile(r"\((?:radv|dg\d|bmg|acm|llvm)[^)]*\)"), " "),
    (re.compile(r"\b(?:with|mit|avec|con|und|et)[ -]+radeon\b(?:.*?\bgraphics\b|(?: \d{3,4}[ms])?)"), " "),
    (re.compile(r"[^\w.]+"), " "),
    (re.compile(r"(?<=gpu )(\d)g\b"), r"\1"),
    (re.compile(r"\bi ?pad (\d{1,2})th gen(?:eration)?\b"), r"ipad \1"),
    (re.compile(r"\bi ?pad air \d (?=m\d)"), "ipad air "),
    (re.compile(r"\bmobile platform\b|\bfor galaxy\b"), " "),
    (re.compile(r"\b((?:ryzen|ai) [3579]) pro (?=\d{3})"), r"\1 "),
    (re.compile(r"\b(?:arm )?(?:aarch64|arm64|x86 64|amd64)\b"), " "),
    (re.compile(r"(?<=\d)(gre|xtx?|ti|super) ?(\d{1,2}) ?(gb?)\b"), r"\1 \2\3"),
    (re.compile(r"\bmax q\b"), "laptop"),
    (re.compile(r"\b(16[56]0|20[678]0|40[78]0) ?s\b"), r"\1 super"),
    (re.compile(r"\brev(?:ision)? ?\d+(?:\.\d+)?\b"), " "),
    (re.compile(r"\b(?:early |mid |late )?20[12]\d\b"), " "),
    (re.compile(r"\b(?:rasp?berr?y|raspi|rasp|r) ?pi ?(?=\w)|\braspi ?(?=\w)"), "pi "),
    (re.compile(r"\bpi 500 plus\b(?!.*\dg)"), "pi 5 16gb"),
    (re.compile(r"\bpi 500\b(?! plus|.*\dg)"), "pi 5 8gb"),
    (re.compile(r"\bpi 500(?: plus)?\b"), "pi 5"),
    (re.compile(r"\b(rog (?:xbox )?ally x)\b(?!.*\dg)"), r"\1 24gb"),
    (re.compile(r"\b(orange|banana|mango)pi ?"), r"\1 pi "),
    (re.compile(r"\bsamsung (?=[saz] ?\d\d\b)"), "galaxy "),
    (re.compile(r"\br([3579]) (?=\d{4}|pro\b)"), r"ryzen \1 "),
    (re.compile(r"\b(sm\d{4}) [a-z]{2}\b"), r"\1"),
    (re.compile(r"\b(dimensity \d{4}) (?:ultra|ultimate|extreme|energy|leading)\b"), r"\1"),
)
"""Spellings and their replacements, in order: marks, clocks and threads, words of other languages, the graphics in a
processor, revisions, years, the ways to write a product, and the memory of those that are sold with one amount."""
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3000: 0x20}
_OTHER_SCRIPTS = {
    "8 至尊版": "8 elite", "8至尊版": "8 elite", "8-至尊版": "8 elite", "至尊版": "ultra",
    "青春版": "lite", "小米": "xiaomi", "红米": "redmi",
    "华为": "huawei", "荣耀": "honor", "一加": "oneplus", "三星": "samsung", "苹果": "apple", "英伟达": "nvidia",
    "英特尔": "intel", "酷睿": "core", "至强": "xeon", "锐龙": "ryzen", "霄龙": "epyc", "线程撕裂者": "threadripper",
    "高通": "qualcomm", "骁龙": "snapdragon", "联发科": "mediatek", "天玑": "dimensity", "麒麟": "kirin",
    "树莓派": "raspberry pi", "香橙派": "orange pi", "联想": "lenovo", "戴尔": "dell", "惠普": "hp", "华硕": "asus",
    "微星": "msi", "技嘉": "gigabyte", "七彩虹": "colorful", "影驰": "galax", "蓝宝石": "sapphire", "铭瑄": "maxsun",
    "零刻": "beelink", "极摩客": "gmktec", "铭凡": "minisforum", "显卡": "card", "ラズパイ": "raspberry pi",
    "갤럭시": "galaxy", "아이폰": "iphone", "라이젠": "ryzen", "라즈베리파이": "raspberry pi",
}
"""Makers and products in other scripts; the longer of two that begin alike comes first."""
_LABEL = re.compile(r"(?i)^\W*(?:model identifier|model|host|hardware|machine|product name|device|board) ?[:=]\s*|"
                    r"\bgoogle (?=colab|cloud)|(?<=google) cloud\b")
_NEGATED = re.compile(r"(?i)[(,;]?\s*\b(?:not|не|nicht|pas|non?[- ](?=ti\b|super\b|xt\b|x\b|oc\b)|kein\w*|sans|ohne) ?"
                      r"(?!sure|certain|only|sicher|nur)(?:the |an? |die |der |das |la |le |el |de )*"
                      r"(?:[rg]tx )?(?:\d{3,4} ?)?(?:ti|super|xtx?|max|pro|ultra|plus|laptop|mobile|d)\b"
                      r"(?: version)?\s*\)?")
UNITS = ("cpu", "gpu", "npu")
_UNITS = {"cuda": "gpu", "metal": "gpu", "vulkan": "gpu", "sycl": "gpu", "npu": "npu"}
"""Units that a program's language runs on; else the processor."""
_STORES = (64, 128, 256, 512, 1024)
_POCKET = ("arm-phone", "apple-cpu")
"""Sizes that a name states of a phone's storage, and classes of phones."""
Key = tuple[str, ...]
MAX_CHARACTERS = 200
"""Length limit of a name."""


@dataclass(frozen=True)
class Typed:
    """A name as a user typed it, split into parts."""

    words: Key
    """Words and numbers that identify it."""
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
    """Return the unit on which a device's programs run: gpu, npu or cpu."""
    return _UNITS.get(profile.isa, "cpu")


def unit_in_words(profile: DeviceProfile) -> str:
    """Return the unit as a sentence names it, such as the GPU (Metal)."""
    unit = unit_of(profile)
    language = {"cuda": "CUDA", "metal": "Metal", "vulkan": "Vulkan", "sycl": "SYCL"}.get(profile.isa)
    return f"the {unit.upper()} ({language})" if language else f"the {unit.upper()}"


def one_script(text: str) -> str:
    """Return a name with full-width characters as plain ones, Chinese names of makers and products in Latin letters,
    and without what it says that it is not: "RTX 3080 (not the Ti)".
    """
    for word, latin in _OTHER_SCRIPTS.items():
        text = text.replace(word, f" {latin} ")
    return _NEGATED.sub(" ", _LABEL.sub("", text.translate(_FULL_WIDTH))).strip()


def plain(text: str) -> str:
    """Return a name in lower case and one spelling, without screens, storage and marks."""
    text = _PLUS.sub(" plus", _SCREEN.sub(" ", text[:MAX_CHARACTERS].lower().replace("_", " ")))
    for spelling, one in _REWRITTEN:
        text = spelling.sub(one, text)
    return _GENERATION.sub(" ", _STORAGE.sub(" ", text))


def taken_apart(text: str) -> Typed:
    """Take a name apart."""
    text = plain(text)
    stated = AMOUNT.search(text)
    memory = int(stated[1] or stated[3]) * (1024 if (stated[2] or "").startswith("t") else 1) if stated else None
    text = _CASES.sub(" ", AMOUNT.sub(" ", text))
    return Typed(tuple(word for word in _WORDS.findall(text) if word not in _NOISE), memory)


def cheap_key(text: str) -> Key:
    """Return a name's words in no order, as they are written: enough to find names that are spelled like it."""
    return tuple(sorted(word for word in _WORDS.findall(text.lower().replace("_", " ")) if word not in _NOISE))


def one_memory(profile: DeviceProfile, text: str) -> DeviceProfile:
    """Return a device whose name states one memory; a further amount, with which it is not sold, is its storage.

    Raises
    ------
    UsageError
        The name states two amounts of memory.
    """
    stated = [int(one or other) * (1024 if unit.startswith("t") else 1)
              for one, unit, other in AMOUNT.findall(_STORAGE.sub(" ", plain(text)))]
    sold = [gib for gib in dict.fromkeys(stated) if gib in profile.memory_gib]
    if len(sold) > 1:
        raise UsageError(f"{text!r} states {sold[0]} GB and {sold[1]} GB of memory; leave one of them out.")
    return profile


def with_memory(profile: DeviceProfile, stated: int | None) -> DeviceProfile:
    """Return a device with the memory that its name states; without one it has that of its profile.

    Raises
    ------
    UsageError
        The device is not sold with that much memory.
    """
    if stated is None or (not profile.memory_gib and stated << 30 == profile.memory_bytes):
        return profile
    most, known = profile.memory_bytes >> 30, profile.memory_gib
    if stated not in known if known else stated > most:
        if stated in _STORES and (profile.device_class in _POCKET or profile.name.startswith("steam-deck")):
            return profile
        exist = f"exists with {_either(known)} GB" if known else f"has at most {most} GB"
        raise UsageError(f"{profile.title} ({profile.name}) {exist}, not with {stated} GB; leave the memory out, or "
                         "give a profile of your own as a TOML file.")
    title = profile.title if f"{stated} GB" in profile.title else f"{profile.title}, {stated} GB"
    version = f"with {stated} GB"
    if bandwidth := profile.versions.get(version):  # nothing was observed of it
        others = {name: value for name, value in profile.versions.items() if name != version}
        profile = replace(profile, bandwidth_gbs=bandwidth, effective_gbs=None, programs={}, versions=others)
    return replace(profile, memory_bytes=stated << 30, memory_gib=(stated,), title=title)


def meant(typed: Typed, text: str, found: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return the one of several devices of a name that is meant: the one with that memory, or of exactly that name.

    Raises
    ------
    UsageError
        The name is that of several devices, or none of them is sold with that memory.
    """
    if typed.memory_gib is not None and len(found) > 1:
        sold = sorted({gib for one in found for gib in one.memory_gib})
        if typed.memory_gib not in (*sold, *_STORES) and all(one.memory_gib for one in found):
            raise UsageError(f"{found[0].title} exists with {_either(sold)} GB, not with {typed.memory_gib} GB; leave "
                             "the memory out, or give a profile of your own as a TOML file.")
        found = [one for one in found if typed.memory_gib in one.memory_gib] or found
    if typed.memory_gib is None and len(found) > 1:  # a name with an amount is that of a version: "RTX 3080 12GB"
        found = [one for one in found if not _only_with_memory(one, typed.key)] or found
    said = typed.whole[0], "".join(filter(str.isalnum, text.lower()))
    own = [one for one in found if one.name.replace("-", "") in said]
    if len(found) == 1 or len(own) == 1:
        return [*own, *found][0]
    names = _either(f"{one.name!r} ({one.title})" for one in found)
    raise UsageError(f"{text!r} is the name of {len(found)} devices, {names}; name one of them.")


def _only_with_memory(profile: DeviceProfile, key: Key) -> bool:
    """Return whether a device has a name only where that states the memory."""
    said = [taken_apart(text) for text in (profile.name, profile.title, *profile.aliases)]
    stated = {typed.memory_gib is not None for typed in said if typed.key == key}
    return stated == {True}


def nearest(typed: Typed, known: Mapping[Key, str]) -> str:
    """Return a hint for a name that is not a device's: near spellings, else those of its kind, which are others."""
    words = {" ".join(key): name for key, name in known.items() if len(key) > 1}
    near = similar(" ".join(typed.key), words, n=40, cutoff=0.3)
    same = [words[word] for word in near if _same_spelt_otherwise(word.split(), typed.key)]
    if typed.key and not _numbers(typed.key):  # a part of a name, such as "orange pi"
        same += [name for key, name in known.items() if set(typed.key) < set(key)]
    others = [words[word] for word in near]
    if same:
        return f"did you mean {_either(repr(name) for name in list(dict.fromkeys([*same, *others]))[:3])}?"
    if names := list(dict.fromkeys(others))[:3]:
        return (f"the names next to it, {_either(map(repr, names))}, are other devices'. 'edgeinfer devices' lists the "
                "known ones; --bandwidth, --cores and --class describe another.")
    return ("'edgeinfer devices' lists the known ones; --bandwidth, --cores and --class describe another, and a TOML "
            "file is given by its path.")


def _same_spelt_otherwise(words: list[str], typed: Key) -> bool:
    """Return whether two names have the same numbers, and letters that differ by a slip: 4090 laptop is not an rtx
    4090."""
    import difflib

    letters = ["".join(word for word in name if not word[0].isdigit()) for name in (words, typed)]
    return _numbers(words) == _numbers(typed) and difflib.SequenceMatcher(None, letters[0], letters[1]).ratio() > 0.6


def _numbers(words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if word[0].isdigit())


def _either(items: Iterable[object]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} or {last}" if first else last
