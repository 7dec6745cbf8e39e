"""The demo model with a screen of its output head."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from edgeinfer.bundle import SCREEN_FILE, Bundle, BundleWriter, weights_identity
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path
from edgeinfer.sparse.head import make_screen
from edgeinfer.sparse.making import open_source
from edgeinfer.sparse.neurons import copy_weights


def write_screened_demo(directory: Path) -> Path:
    """Write it, fitted to text of its own, without a measurement."""
    with LLM("demo", threads=1) as llm:
        ids = [one for i in range(3) for one in llm.complete("Once upon a time", max_tokens=300, seed=i).token_ids]
    path = directory / "screened"
    with Bundle.open(demo_path()) as bundle, ExitStack() as stack, \
            BundleWriter(path, bundle.config, bundle.header.quantisation) as writer:
        screen = make_screen(open_source(stack, bundle.path, bundle, 1, lambda *_: None), bundle, ids, rank=32)
        copy_weights(bundle, writer)
        for entry in bundle.header.files:
            if entry.part in ("", "quality"):
                continue
            writer.copy_file(bundle.path / entry.name, part=entry.part)
        writer.add_file(SCREEN_FILE, screen.pack(weights_identity(bundle.header.tensors)), "screen")
    return path
