"""The catalogue of kernels: families with the names of their operands, their parameters, and where their references
are.

Part of the contract: it imports neither Numba nor NumPy, so a graph is refused by a kernel's name at no cost. `extend`
adds kernels from outside the package.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import KernelError
from edgeinfer.quant import KV_TYPES, TYPES

from .abi import NEURON_TYPES
from .parameters import (
    ATTENTION,
    CONV,
    EXPERTS_INPUT,
    EXPERTS_RESOLVE,
    GATED_NORM,
    LATENT,
    LINEAR,
    NEURON_DOWN,
    NEURON_GATED,
    NEURON_MASK,
    NEURON_RESOLVE,
    POSITIONS,
    RELEASE,
    ROPE,
    ROUTE,
    ROWS,
    RULE,
    SAMPLE,
    SCREEN,
    VALUES,
)

_TILES = tuple(row for row in TYPES.values() if "tile16" in row.layouts)
WEIGHTS = tuple(end for row in _TILES for end in row.suffixes)
"""Ends of the names of kernels that read weights in tile16."""
_UNUSUAL = tuple(name for name in NEURON_TYPES if not TYPES[name].usual)
FOREIGN = tuple(end for row in _TILES if not row.usual for end in row.suffixes)
"""Kernels of types that few models have: `warmup` leaves them to the first run that needs them."""
SCREENED = tuple(end for row in _TILES if row.simple for end in row.suffixes)
"""Ends of the names of kernels of a head that can be screened."""
KV = tuple(KV_TYPES)
_MATMUL = ("weights", "x", "out", "bias", "scratch", "source", "norm", "apart")
_REFERENCE = "edgeinfer.kernels.reference"


@dataclass(frozen=True)
class Family:
    """Kernels whose instructions look alike."""

    name: str
    kernels: tuple[str, ...]
    operands: tuple[str, ...] = ()
    """Names, by index."""
    parameters: tuple[int, ...] = ()
    """The named tuple of indices (parameters/); empty if the kernels take none of these."""
    why_no_reference: str = ""
    """Why no NumPy reference exists; empty if each kernel has one in `reference.REFERENCES`."""


FAMILIES = (
    Family("linear", tuple(f"linear_{w}" for w in WEIGHTS), _MATMUL, LINEAR),
    Family("gated", tuple(f"gated_{w}" for w in WEIGHTS), _MATMUL, LINEAR),
    Family("route", ("route", "sort_routes"), ("source", "out", "bias", "scratch", "factors"), ROUTE),
    Family("experts_input", ("experts_input_q8", "experts_input_f32"), ("source", "out", "list"), EXPERTS_INPUT),
    Family("experts", tuple(f"experts_{part}_{w}" for part in ("gated", "down") for w in WEIGHTS),
           ("weights", "x", "out", "bias", "scratch", "source", "routes", "list", "locations"), LINEAR),
    Family("experts_resolve", ("experts_resolve",),
           ("routes", "locations", "slots", "owners", "counts", "stamps", "words", "wanted"), EXPERTS_RESOLVE),
    Family("sigmoid_gate", ("sigmoid_gate",), ("source", "out"), ROWS),
    Family("embed", tuple(f"embed_{w}" for w in WEIGHTS), ("table", "out"), ROWS),
    Family("rows", ("quantize", "rms_norm_f32", "rms_norm_q8", "gather_outputs"),
           ("source", "out", "norm, order or columns", "scratch"), ROWS),
    Family("norm", ("norm_f32", "norm_q8"), ("source", "out", "norm", "scratch", "bias", "scalar"), ROWS),
    Family("values", ("activate",), ("rows", "by"), VALUES),
    Family("positions", ("add_positions",), ("rows", "table"), POSITIONS),
    Family("causal_conv", ("causal_conv",), ("x", "out", "weights", "bias", "state"), CONV),
    Family("rule", ("delta_rule", "delta_rule_rows", "selective_scan", "state_journal"),
           ("x", "gates", "out", "a", "dt_bias", "d", "state", "scratch"), RULE),
    Family("gated_norm", ("gated_norm",), ("x", "gate", "out", "weight"), GATED_NORM),
    Family("rope_store", tuple(f"rope_store_{kv}" for kv in KV), ("qkv", "table", "kv", "q_norm", "k_norm"), ROPE),
    Family("store_latent", tuple(f"store_latent_{kv}" for kv in KV),
           ("queries", "rotated", "latent", "table", "kv", "norm"), LATENT),
    Family("attention", (*(f"attention_{kv}" for kv in KV), *(f"attention_scores_{kv}" for kv in KV),
                         *(f"attention_values_{kv}" for kv in KV), "attention_select", "attention_merge"),
           ("qkv", "out", "kv", "scratch", "partial", "scores", "pruned", "means", "sinks", "slopes"),
           ATTENTION),
    Family("neuron_gated", tuple(f"neuron_gated_{name}" for name in NEURON_TYPES),
           ("weights", "x", "f", "masks", "scratch", "bias", "sums", "source", "norm", "table", "slots", "by"),
           NEURON_GATED),
    Family("neuron_down", tuple(f"neuron_down_{name}" for name in NEURON_TYPES),
           ("weights", "f", "out", "scratch", "bias", "sums", "table", "slots", "by"), NEURON_DOWN),
    Family("neuron_mask", ("neuron_mask_scores", "neuron_mask_signs"),
           ("scores", "thresholds", "out", "scratch", "signs"), NEURON_MASK),
    Family("neuron_resolve", ("neuron_resolve",), ("masks", "table", "slots", "owners", "uses", "stamps", "words"),
           NEURON_RESOLVE),
    Family("screen", ("screen_maxima", *(f"{name}_{w}" for name in ("screen_least", "head") for w in SCREENED)),
           ("weights", "x", "out", "estimates", "bounds", "work", "low", "scratch"), SCREEN),
    Family("sample", ("sample_edit", "sample_blocks", "sample_choose"), ("logits", "work"), SAMPLE),
    Family("stream", ("stream_release",), (), RELEASE),
    Family("reader", ("reader",), why_no_reference="it reads files ahead of the program and is no step of it"),
    Family("probe", ("stream_read", "random_read", "int8_peak", "f32_peak"), ("source", "out"),
           why_no_reference="probes measure the machine; their tests compute the expected memory"),
    Family("forward", ("worker", "submit", "wait", "spin"),
           why_no_reference="these run the program and are no step of it; their proof stands in ops/forward.py"),
)


@dataclass(frozen=True, eq=False)
class Extension:
    """Kernels of a module outside the package."""

    module: str
    """Name of the module; importing it registers the kernels (`registry.kernel`)."""
    references: Mapping[str, str]
    """The reference of each kernel, ``module:function``, by the kernel's name."""

    def sources(self) -> list[Path]:
        """Return the files whose bytes name the compiled set: all of the module's package, or the module alone."""
        spec = None
        with contextlib.suppress(ModuleNotFoundError):  # of the package around it
            spec = find_spec(self.module)
        if spec is None or not spec.origin:
            raise KernelError(f"The module {self.module} of the kernels {', '.join(self.references)} cannot be found; "
                              "put "
                              "it where Python imports from.")
        file = Path(spec.origin)
        return sorted(file.parent.rglob("*.py")) if spec.parent else [file]

    def source_hash(self, base: str) -> str:
        """Return the hash of names and files on top of that of the package's own kernels."""
        digest = hashlib.sha256(" ".join([base, *sorted(self.references)]).encode())
        for file in self.sources():
            digest.update(file.read_bytes())
        return digest.hexdigest()


_FAMILY_OF = {name: family for family in FAMILIES for name in family.kernels}
_EXTENSIONS: dict[str, Extension] = {}


def extend(module: str, kernels: Mapping[str, str]) -> None:
    """Add kernels from outside the package; they are compiled when a program first asks for them.

    Parameters
    ----------
    module : str
        A module that defines them with `registry.kernel`, in the language of `vector/`, imported in the compiling
        process alone. They are compiled again when a file of its package changes (of a module outside of packages:
        that file), or the package's own kernels.
    kernels : mapping of str to str
        Names, each with its NumPy reference as ``module:function``.

    Raises
    ------
    KernelError
        If a name is taken, or a reference is not of this form.
    """
    new = Extension(module, dict(kernels))
    for name, reference in new.references.items():
        owner = extension_of(name)
        if name in _FAMILY_OF or (owner and owner.module != module):
            raise KernelError(f"The kernel name {name!r} of {module} is taken by "
                              f"{owner.module if owner else 'the package'}; choose another.")
        if not all(reference.partition(":")):
            raise KernelError(f"The reference {reference!r} of the kernel {name} has no module; write module:function.")
    _EXTENSIONS[module] = new


def extension_of(kernel: str) -> Extension | None:
    """Return the extension that brings a kernel, or None."""
    return next((e for e in _EXTENSIONS.values() if kernel in e.references), None)


def family_of(kernel: str) -> Family | None:
    """Return the family of one of the package's kernels, or None."""
    return _FAMILY_OF.get(kernel)


def is_foreign(kernel: str) -> bool:
    """Return whether few models need a kernel: mixtures of experts, or weights in types of other formats' files."""
    return kernel.startswith("experts_") or kernel.endswith(tuple(f"_{end}" for end in (*FOREIGN, *_UNUSUAL)))


def is_known(kernel: str) -> bool:
    """Return whether a kernel of this name exists, here or in an extension."""
    return kernel in _FAMILY_OF or extension_of(kernel) is not None


def has_reference(kernel: str) -> bool:
    """Return whether a kernel exists and has a NumPy reference; nothing is imported."""
    family = _FAMILY_OF.get(kernel)
    return not family.why_no_reference if family else extension_of(kernel) is not None


def reference_of(kernel: str) -> Callable[[Any], list[Any]] | None:
    """Import and return a kernel's NumPy reference; None if there is none (`Family.why_no_reference`) or no such
    kernel.
    """
    if extension := extension_of(kernel):
        module, _, function = extension.references[kernel].partition(":")
        reference: Callable[[Any], list[Any]] = getattr(import_module(module), function)
        return reference
    return import_module(_REFERENCE).REFERENCES[kernel] if has_reference(kernel) else None
