"""The pages that are made from the program: ``python -m tests.make_documents`` writes
docs/explanation/demo-program.md."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.models import demo_path
from edgeinfer.runtime import Session
from tests.helpers.command_line import edgeinfer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "demo-program.md"
CONTEXT, THREADS = 512, 2
INTRODUCTION = """# The plan and the program of the demo

This page is made from the program and compared with it by a test: `python -m tests.make_documents`.

`edgeinfer plan demo --ctx {ctx} --threads {threads}`, without lines that depend on the machine:
"""
ACTIVATIONS = """
Where the activations of {tokens} tokens lie: memory is free again after its tensor's last reader, so a few buffers
serve all layers. x is the residual stream, h a normalised input, q a quantised one, a attention's result, f the FFN's
inside.
"""
PROGRAM = """
`edgeinfer info demo --program`: an instruction is one call of a kernel. The names are the same with every instruction
set.
"""


def demo_program() -> str:
    """The page."""
    plan = edgeinfer("plan", "demo", "--ctx", CONTEXT, "--threads", THREADS).out.split("\n\n")[1]
    program = edgeinfer("info", "demo", "--program").out.split("\n\n")[1]
    with Bundle.open(demo_path()) as bundle:
        session = Session(bundle, RuntimeConfig(ctx=CONTEXT, threads=THREADS))
        try:
            tokens = session.plan.request.tokens
            allocations = {name: at for name, at in session.plan.allocations.items() if at.region == "activations"}
        finally:
            session.close()
    names: dict[tuple[int, int], list[str]] = {}
    for name, at in allocations.items():
        names.setdefault((at.offset, at.nbytes), []).append(name)
    rows = [f"{'offset':>8} {'bytes':>8}  tensors"]
    rows += [f"{offset:8} {nbytes:8}  {' '.join(found)}" for (offset, nbytes), found in sorted(names.items())]
    return (INTRODUCTION.format(ctx=CONTEXT, threads=THREADS) + fenced(plan) + ACTIVATIONS.format(tokens=tokens)
            + fenced("\n".join(rows)) + PROGRAM + fenced(program))


def fenced(text: str) -> str:
    """A block as it was printed."""
    return "\n```\n" + "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(demo_program(), encoding="utf-8")
