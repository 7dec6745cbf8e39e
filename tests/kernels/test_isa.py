"""The list of ISA levels of instruction sets: what is chosen, what can be forced, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.kernels import ISA_LEVELS, abi, available, choose, isa, machine

X86 = frozenset({"avx2", "fma", "f16c", "avx512bw", "avx512vl", "avx512vnni"})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be another machine."""

    def pretend(machine_name: str, features: frozenset[str] = frozenset()) -> None:
        monkeypatch.delenv("EDGEINFER_ISA", raising=False)
        monkeypatch.setattr(isa, "machine", lambda: machine_name)
        monkeypatch.setattr(isa, "host_features", lambda: features)

    return pretend


def names() -> list[str]:
    return [level.name for level in available()]


def test_the_best_isa_level_is_chosen(host) -> None:
    host("x86_64", X86)
    assert names() == ["avx512vnni", "avx2", "generic"]
    assert choose().name == "avx512vnni"


@pytest.mark.parametrize("missing", sorted(X86))
def test_a_isa_level_is_never_offered_where_a_feature_is_missing(host, missing: str) -> None:
    host("x86_64", X86 - {missing})
    for level in ISA_LEVELS:
        if level.machine == "x86_64" and missing in level.needs:
            assert level not in available()
            with pytest.raises(UsageError, match=level.name):
                choose(level.name)
    assert choose().needs <= X86 - {missing}


def test_a_machine_without_vector_extensions_gets_generic(host) -> None:
    host("x86_64")
    assert names() == ["generic"]
    host("aarch64")
    assert names() == ["neon", "generic"]  # every core of that architecture has NEON
    assert choose().machine == "aarch64"


def test_each_isa_level_needs_what_it_is_compiled_for() -> None:
    """Features that LLVM may use imply those of the guard, or the process would die of an illegal instruction."""
    implied = {"avx512vnni": {"avx512f", "avx512dq"}, "avx2": {"avx"}, "fma": {"avx"}, "dotprod": {"lse"}}
    everywhere = {"x86_64": {"bmi", "bmi2", "lzcnt", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2"}, "aarch64": set()}
    baseline = {"x86_64": set(), "aarch64": {"neon", "reserve-x18"}}
    for level in ISA_LEVELS:
        compiled = {feature[1:] for feature in level.features.split(",") if feature.startswith("+")}
        covered = set(level.needs).union(*(implied.get(feature, set()) for feature in level.needs))
        covered |= everywhere[level.machine] | {"avx2"} if level.needs else set()
        assert compiled <= covered | baseline[level.machine], level.name
        if level.machine == "aarch64":
            assert {"-sve", "-sve2"} <= set(level.features.split(","))


def test_register_blocks_of_each_isa_level() -> None:
    """Blocks become smaller down to pairs; their tokens fit a parameter, what a gated block leaves its scratch."""
    for level in ISA_LEVELS:
        heights = level.token_tiles
        assert heights == tuple(sorted(set(heights), reverse=True)) and heights[-1] == 2 and heights[0] < 16, level.name
        assert level.row_tiles in (1, 2) and level.streams % level.row_tiles == 0, level.name
        assert abi.unpack_token_tiles(abi.pack_token_tiles(heights)) == heights
        assert abi.pack_token_tiles(heights) < 1 << 31
        assert 2 * max(heights[0], 4 * level.streams) * 64 <= abi.GATED_SCRATCH_BYTES, level.name


def test_forced_by_the_environment(host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("x86_64", X86)
    monkeypatch.setenv("EDGEINFER_ISA", "avx2")
    assert choose().name == "avx2"
    assert choose("generic").name == "generic"


@pytest.mark.parametrize("name", ["avx1024", "avx512vnni", "neon"])
def test_an_unknown_or_missing_isa_level_is_refused_with_the_names(host, monkeypatch: pytest.MonkeyPatch,
                                                                   name: str) -> None:
    host("x86_64", X86 - {"avx512vnni"})
    monkeypatch.setenv("EDGEINFER_ISA", name)
    with pytest.raises(UsageError) as caught:
        choose()
    assert str(caught.value) == f"Instruction set '{name}' is not available here; choose one of avx2, generic."


def test_an_unknown_architecture_is_refused(host) -> None:
    host("riscv64")
    with pytest.raises(UsageError, match="architecture, 'riscv64'; x86_64 and aarch64 are supported"):
        choose()


@pytest.mark.parametrize(("reported", "ours"), [("AMD64", "x86_64"), ("x86_64", "x86_64"), ("arm64", "aarch64")])
def test_names_of_machines(monkeypatch: pytest.MonkeyPatch, reported: str, ours: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: reported)
    assert machine() == ours


def test_this_machine() -> None:
    """In a process of its own: the real environment variable, and features that the kernel reports as well."""
    script = "from edgeinfer.kernels import choose; print(choose().name)"
    environment = {**os.environ, "EDGEINFER_ISA": "generic"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "generic", done.stderr
    try:
        text = Path("/proc/cpuinfo").read_text().replace("avx512_vnni", "avx512vnni").replace("avx_vnni", "avxvnni")
        flags = set(text.replace("asimddp", "dotprod").split())
    except OSError:
        pytest.skip("no /proc/cpuinfo here")
    for level in available():
        assert level.needs <= flags, level.name
