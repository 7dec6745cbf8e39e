"""Tolerances of results against their specifications: one table for all tests.

The kernels' own tolerances are beside their references, because EDGEINFER_CHECK=1 uses them outside the tests as well.
"""

from __future__ import annotations

from edgeinfer.kernels.reference import TOLERANCES as KERNELS

EXP = 4e-7
"""Relative error of the polynomial for e^x and what is made of it: 3 units in the last place of float32."""
ERF = 3e-7
"""Absolute error of the polynomial for erf."""

__all__ = ["ERF", "EXP", "KERNELS"]
