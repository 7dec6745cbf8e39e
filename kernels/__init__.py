"""SIMD kernels written in Python, their NumPy references, and the objects that a process links.

The contract is beside this file (abi/, routes.py, parameters/, catalogue.py, registry.py, isa.py); `ops/` holds the
kernels, `vector/` the language they are written in, `toolchain/` their compiler and linker, `reference/` their
references.

Shape letters: T tokens, D model (hidden_size), H heads, K key-value heads, E head size, F feed-forward, V vocabulary,
G group. Nothing here imports Numba but the build (compile.py and the kernel files that it loads in a process of its
own). `abi`, `catalogue`, `parameters`, `reference`, `routes` and `sampling` are offered as modules, for their names
read best with the module's.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from . import abi, catalogue, parameters, reference, routes, sampling
    from .catalogue import extend, reference_of
    from .isa import ISA_LEVELS, Isa, available, choose, halves_streams, machine
    from .parameters import (
        ACTIVATIONS,
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
        PAIRED,
        POSITIONS,
        RELEASE,
        ROPE,
        ROUTE,
        ROWS,
        RULE,
        SAMPLE,
        SCREEN,
        VALUE_FUNCTIONS,
        VALUES,
        fill,
    )
    from .toolchain.link import Kernels
    from .toolchain.objects import cache_directory, package_directory
    from .toolchain.provide import find_set

__all__ = ["ACTIVATIONS", "ATTENTION", "CONV", "EXPERTS_INPUT", "EXPERTS_RESOLVE", "GATED_NORM", "ISA_LEVELS", "LATENT",
           "LINEAR", "NEURON_DOWN", "NEURON_GATED", "NEURON_MASK", "NEURON_RESOLVE", "PAIRED", "POSITIONS", "RELEASE",
           "ROPE", "ROUTE", "ROWS", "RULE", "SAMPLE", "SCREEN", "VALUES", "VALUE_FUNCTIONS", "Isa", "Kernels", "abi",
           "available", "cache_directory", "catalogue", "choose", "extend", "fill", "find_set", "halves_streams",
           "machine", "package_directory", "parameters", "reference", "reference_of", "routes", "sampling"]
__getattr__ = lazily(__name__, {
    "isa": "Isa available choose halves_streams machine ISA_LEVELS",
    "toolchain.objects": "cache_directory package_directory", "toolchain.link": "Kernels",
    "toolchain.provide": "find_set",
    "parameters": "ACTIVATIONS ATTENTION CONV GATED_NORM RULE SAMPLE EXPERTS_INPUT EXPERTS_RESOLVE LINEAR NEURON_DOWN "
                  "NEURON_GATED NEURON_MASK NEURON_RESOLVE LATENT PAIRED RELEASE POSITIONS ROPE ROUTE ROWS SCREEN "
                  "VALUES VALUE_FUNCTIONS fill parameters",
    "abi": "abi", "catalogue": "catalogue extend reference_of", "reference": "reference", "routes": "routes",
    "sampling": "sampling",
})
