"""A server and a browser for the tests of the chat page: Debian's chromium, or another one of its kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.graph import read_config
from tests.helpers.chat_page import Chat, process_serving
from tests.helpers.checkpoints import make_checkpoint, random_tensors, tiny_config

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CTX = 16384
WIDE = {"width": 1280, "height": 800}


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template that takes milliseconds for a token, and whose greedy text has no end."""
    directory = tmp_path_factory.mktemp("chat")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 4, "max_position_embeddings": CTX}
    head = random_tensors(read_config(tiny_config(**shape)))["lm_head.weight"]
    head[:4] = np.zeros_like(head[:4])
    source = make_checkpoint(directory / "checkpoint", tensors={"lm_head.weight": head}, **shape)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, directory / "bundle", weights="f32")
    return directory / "bundle"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[str]:
    with process_serving(tmp_path_factory.mktemp("server") / "log", "--model", f"chat={chat_model}") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser for one file: no other event loop runs in a thread while playwright drives a browser from it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra 'reference')")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)} is on the path")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, server: str) -> Iterator[Callable[..., Chat]]:
    """Open the page in a profile of its own; checked at the end."""
    found = []

    def open_page(url: str = server, ready: bool = True, **options: Any) -> Chat:
        context = browser.new_context(**{"viewport": WIDE, **options})
        chat = Chat(context.new_page(), url)
        found.append((context, chat))
        if ready:
            chat.open()
        return chat

    yield open_page
    for context, chat in found:
        chat.check()
        context.close()


@pytest.fixture
def chat(opened: Callable[..., Chat]) -> Chat:
    return opened()
