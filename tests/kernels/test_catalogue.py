"""The catalogue of kernels against what is registered and what has a reference, and kernels from outside the
package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import KernelError
from edgeinfer.kernels import abi, available, catalogue, extend, fill, reference_of
from edgeinfer.kernels.reference import REFERENCES
from edgeinfer.kernels.toolchain import objects
from tests.helpers.kernel_bench import ISAS, Bench
from tests.scale_rows import SCALE

ROOT = Path(edgeinfer.__file__).parents[1]
NAMES = {name for family in catalogue.FAMILIES for name in family.kernels}
MODULE, REFERENCE = "tests.scale_rows.kernels", {"scale_rows": "tests.scale_rows.reference:scale_rows"}


@pytest.fixture(autouse=True)
def no_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_EXTENSIONS", {})


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_names_every_registered_kernel_and_no_other() -> None:
    """Registered in a process of its own, as for compiling."""
    registered = run("from edgeinfer.kernels import available; from edgeinfer.kernels.toolchain import compile;"
                     "print(*compile.load_kernels(available()[-1]))").split()
    assert len(registered) == len(set(registered)) and set(registered) == NAMES
    assert sum(len(family.kernels) for family in catalogue.FAMILIES) == len(NAMES)


def test_every_kernel_has_a_reference_or_a_reason_why_not() -> None:
    without = {name for family in catalogue.FAMILIES if family.why_no_reference for name in family.kernels}
    assert without == {"worker", "submit", "wait", "spin", "reader", "stream_read", "random_read", "int8_peak",
                       "f32_peak"}
    assert set(REFERENCES) == NAMES - without == {name for name in NAMES if catalogue.has_reference(name)}
    assert all(reference_of(name) is REFERENCES[name] for name in REFERENCES) and not any(map(reference_of, without))


def test_families_fit_an_instruction() -> None:
    for family in catalogue.FAMILIES:
        assert len(family.operands) <= abi.N_OPERANDS and len(family.parameters) <= abi.N_PARAMETERS, family.name
        assert all(catalogue.family_of(name) is family for name in family.kernels)


def test_an_unknown_kernel_is_known_as_such_without_numba_or_numpy() -> None:
    run("import sys; from edgeinfer.kernels import catalogue as c;"
        "assert c.is_known('linear_f16') and c.has_reference('linear_f16');"
        "assert c.is_known('wait') and not c.has_reference('wait');"
        "assert not c.is_known('gemv') and not c.has_reference('gemv') and c.reference_of('gemv') is None;"
        "assert not {'numba', 'numpy'} & set(sys.modules)")


# -- kernels from outside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
def test_a_kernel_from_outside_runs_beside_the_packages_own(isa: str) -> None:
    assert not catalogue.is_known("scale_rows")
    extend(MODULE, REFERENCE)
    assert catalogue.is_known("scale_rows") and catalogue.has_reference("scale_rows")
    bench, x = Bench(), np.random.default_rng(0).standard_normal((5, 48)).astype(np.float32)
    operands = [bench.put("activations", x), bench.reserve("activations", x.nbytes)]
    bench.tokens([0] * 5)
    for threads in (1, 2):
        parameters = fill(SCALE, width=33, stride=192, rows=abi.COUNT_TOKENS, factor=-1.5)
        out = bench.run(isa, "scale_rows", operands, parameters, threads=threads)["out"]
        np.testing.assert_array_equal(out, x[:, :33] * np.float32(-1.5))


def test_this_process_compiles_nothing_itself() -> None:
    """Linked beside the package's own kernels, in a set of its own; neither Numba nor the module is imported."""
    run("import sys; from edgeinfer.kernels import Kernels, available, extend;"
        f"extend({MODULE!r}, {REFERENCE!r}); k = Kernels(next(isa for isa in available() if isa.name == {ISAS[0]!r}));"
        "a = k.addresses(['quantize', 'scale_rows']); assert a['quantize'] != a['scale_rows'];"
        f"assert not {{'numba', {MODULE!r}}} & set(sys.modules)")


def test_its_set_is_named_by_its_sources_and_by_those_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "tests" / "scale_rows", tmp_path / "scaling")
    monkeypatch.syspath_prepend(tmp_path)
    extend("scaling.kernels", {"scale_rows": "scaling.reference:scale_rows"})
    extension = catalogue.extension_of("scale_rows")

    def name() -> str:
        return objects.KernelSet(available()[0], extension).directory(tmp_path, False).name

    names = [name()]
    assert names[0].rpartition("-")[0].endswith(f"{available()[0].name}+scaling.kernels")
    with (tmp_path / "scaling" / "__init__.py").open("a") as file:
        file.write("# another layout\n")
    names.append(name())
    (tmp_path / "scaling" / "parts").mkdir()
    (tmp_path / "scaling" / "parts" / "deep.py").write_text("FACTOR = 2\n")
    names.append(name())
    monkeypatch.setattr(objects, "source_hash", lambda: "other")
    names.append(name())
    assert len(set(names)) == 4


def test_names_that_are_taken_and_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(KernelError) as caught:
        extend(MODULE, {"linear_f16": "a:b"})
    assert str(caught.value) == f"The kernel name 'linear_f16' of {MODULE} is taken by the package; choose another."
    extend(MODULE, REFERENCE)
    extend(MODULE, REFERENCE)  # the same again
    with pytest.raises(KernelError, match=f"'scale_rows' of other is taken by {MODULE}; choose another"):
        extend("other", REFERENCE)
    with pytest.raises(KernelError, match="The reference 'b' of the kernel halve has no module; write module:function"):
        extend("other", {"halve": "b"})
    for module in ("no_such_module", "no_such.module"):
        extend(module, {f"{module} halve": f"{module}:halve"})
        extension = catalogue.extension_of(f"{module} halve")
        with pytest.raises(KernelError, match=f"The module {module} of the kernels {module} halve cannot be found"):
            objects.sources_of(extension)
