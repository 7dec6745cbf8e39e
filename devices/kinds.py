"""Names of kinds of devices, such as Core i5 or iMac, which need a model number."""

from __future__ import annotations

import re

KINDS = {
    r"cpu|processor|laptop|desktop|pc|computer|notebook|server": ("ryzen-7950x", "i5-12400", "m4"),
    r"gpu|igpu|(?:graphics|video) ?card|graphics": ("rtx4090", "rx7900-xtx", "arc-a770"),
    r"(?:nvidia )?(?:geforce|rtx|gtx|nvidia)(?: [rg]tx)?": ("rtx3060", "rtx4090", "rtx5090"),
    r"(?:amd )?(?:radeon|rx)(?: rx)?": ("rx6700-xt", "rx7800-xt", "rx7900-xtx"),
    r"(?:intel )?arc": ("arc-a750", "arc-a770", "arc-b580"),
    r"(?:intel )?(?:core )?i3": ("i3-12100", "i3-13100", "i3-1215u"),
    r"(?:intel )?(?:core )?i5|intel|core|intel core": ("i5-12400", "i5-13600k", "i5-1240p"),
    r"(?:intel )?(?:core )?i7": ("i7-12700k", "i7-14700", "i7-1165g7"),
    r"(?:intel )?(?:core )?i9": ("i9-12900", "i9-12900k", "i9-13900"),
    r"(?:intel )?(?:core )?ultra": ("core-ultra-125h", "core-ultra-155h", "core-ultra-185h"),
    r"(?:intel )?xeon": ("xeon-e5-2690-v4", "xeon-8380", "xeon-8480"),
    r"(?:intel )?xeon 6": ("xeon-6787p", "xeon-6972p", "xeon-6980p"),
    r"(?:amd )?epyc": ("epyc-7763", "epyc-9654", "epyc-9175f"),
    r"(?:amd )?ryzen 5": ("ryzen-5600", "ryzen-7600", "ryzen-9600x"),
    r"(?:amd )?ryzen 7": ("ryzen-5800x", "ryzen-7700", "ryzen-9700x"),
    r"(?:amd )?ryzen(?: 9)?|amd": ("ryzen-5950x", "ryzen-7950x", "ryzen-9950x"),
    r"(?:qualcomm )?snapdragon|qualcomm": ("sd855", "sd8g3", "snapdragon-x"),
    r"(?:apple )?(?:imac|mac|mac ?book(?: air| pro)?|mac ?mini|mac ?studio|apple|silicon)": ("m1", "m2-pro", "m4"),
    r"(?:apple )?(?:iphone|ipad(?: air| pro)?)": ("a15", "a17-pro", "a18"),
}
"""Patterns of whole names, with three devices of each kind."""


def kind_of(text: str) -> tuple[str, ...]:
    """Return three devices of the kind that a name is; none if it is not that of a kind."""
    typed = re.sub(r"\bi (?=[3579]$)", "i", " ".join(re.findall(r"[a-z]+|\d+", text.lower())))
    return next((names for pattern, names in KINDS.items() if re.fullmatch(pattern, typed)), ())
