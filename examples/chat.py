"""Chat with a model, streaming: `python examples/chat.py MODEL [--system TEXT]`. An empty line ends it.

The conversation is a list of messages; the model's own chat template turns it into a prompt, and its common part
with the last one is not computed again. A model without a template, such as demo, continues the text instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from edgeinfer import LLM


def answer(llm: LLM, messages: list[dict[str, str]]) -> Iterator[str]:
    """Yield the answer to the last message, and add it to the messages."""
    if llm.chat_template:
        stream = llm.chat_stream(messages, max_tokens=256)
    else:
        stream = llm.stream(" ".join(message["content"] for message in messages), max_tokens=64, reuse=True)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        yield piece
    messages.append({"role": "assistant", "content": "".join(pieces)})


def talk(llm: LLM, messages: list[dict[str, str]], read: Callable[[str], str] = input) -> None:
    """Read messages and print answers until an empty line or the end of the input."""
    while True:
        try:
            text = read("> ")
        except EOFError:
            return
        if not text.strip():
            return
        messages.append({"role": "user", "content": text})
        for piece in answer(llm, messages):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--system")
    chosen = parser.parse_args()
    with LLM(chosen.model) as llm:
        talk(llm, [{"role": "system", "content": chosen.system}] if chosen.system else [])
