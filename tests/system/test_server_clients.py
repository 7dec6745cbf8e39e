"""Clients that others have written, against the server: openai, ollama and anthropic."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from tests.helpers.serving import Running, chat_model, serving

pytestmark = pytest.mark.reference

HELLO: list[Any] = [{"role": "user", "content": "Tell me a tale."}]
PARAMETERS = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["days"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "connect-clients.md"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving({"demo": chat_model(tmp_path_factory.mktemp("chat"))}) as one:
        yield one


@pytest.fixture(scope="module")
def want(running: Running) -> str:
    return running.llm().chat(HELLO, temperature=0, max_tokens=12)


# -- openai ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def openai(running: Running) -> Iterator[Any]:
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chats(openai: Any, want: str) -> None:
    asked: Any = dict(model="demo", messages=HELLO, temperature=0, max_tokens=12)
    done = openai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert done.choices[0].message.content == want and done.usage.completion_tokens == 12
    assert len(done.choices[0].logprobs.content) == 12
    chunks = list(openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == want
    assert chunks[-1].usage.total_tokens == done.usage.total_tokens
    with openai.chat.completions.stream(**asked, extra_body={"regex": "[a-z]{5}"}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text and len(text) == 5


def test_openai_completes(openai: Any, running: Running) -> None:
    done = openai.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=1)
    assert done.choices[0].text == running.llm().generate("Once upon a time", max_tokens=8, temperature=0)
    assert openai.models.list().data[0].id == "demo"
    assert len(openai.embeddings.create(model="demo", input="fox").data[0].embedding) == 256


def test_openai_parses(openai: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("person", name=(str, pydantic.Field(max_length=8)), old=(bool, ...))
    done = openai.chat.completions.parse(model="demo", messages=HELLO, response_format=person, max_tokens=150, seed=2)
    assert isinstance(done.choices[0].message.parsed, person)


def test_openai_calls_tools(openai: Any) -> None:
    asked: Any = dict(model="demo", messages=HELLO, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
                      max_tokens=150)
    call = openai.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and 1 <= json.loads(call.function.arguments)["days"] <= 9
    with openai.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9


def test_openai_responds(openai: Any, want: str) -> None:
    asked: Any = dict(model="demo", input=HELLO, temperature=0, max_output_tokens=12)
    assert openai.responses.create(**asked).output_text == want
    schema: Any = {"type": "json_schema", "name": "weather", "schema": PARAMETERS}
    with openai.responses.stream(model="demo", input=HELLO, text={"format": schema}) as stream:
        kinds = [event.type for event in stream]
        assert 1 <= json.loads(stream.get_final_response().output_text)["days"] <= 9
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds


def test_openai_reports_errors(openai: Any) -> None:
    import openai as module

    with pytest.raises(module.NotFoundError, match="'other' is not served here"):
        openai.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(module.BadRequestError, match="temperature is -1"):
        openai.chat.completions.create(model="demo", messages=HELLO, temperature=-1)


def test_openai_from_asyncio(running: Running, want: str) -> None:
    module = pytest.importorskip("openai")

    async def main() -> list[str]:
        async with module.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            async def one() -> str:
                stream = await client.chat.completions.create(model="demo", messages=HELLO, temperature=0,
                                                              max_tokens=12, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(6))))

    assert asyncio.run(main()) == [want] * 6


# -- ollama and anthropic ----------------------------------------------------------------------------------------------


def test_ollamas_client(running: Running, want: str) -> None:
    module = pytest.importorskip("ollama")
    client, options = module.Client(running.url), {"temperature": 0, "num_predict": 12}
    assert client.chat(model="demo", messages=HELLO, options=options).message.content == want
    stream = client.chat(model="demo", messages=HELLO, options=options, stream=True)
    assert "".join(one.message.content for one in stream) == want
    assert 1 <= json.loads(client.generate(model="demo", prompt="Once", format=PARAMETERS).response)["days"] <= 9
    assert len(client.embed(model="demo", input=["fox", "crow"]).embeddings) == 2
    assert client.list().models[0].model == "demo:latest" and "tools" in client.show("demo").capabilities
    assert client.ps().models[0].context_length == 512
    with pytest.raises(module.ResponseError, match="not served here"):
        client.chat(model="other", messages=HELLO)
    client._client.close()


def test_anthropics_client(running: Running, want: str) -> None:
    module = pytest.importorskip("anthropic")
    client = module.Anthropic(base_url=running.url, api_key="none", max_retries=0)
    asked: Any = dict(model="demo", messages=HELLO, max_tokens=12, extra_body={"temperature": 0})
    assert client.messages.create(**asked).content[0].text == want
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == want
        assert stream.get_final_message().stop_reason == "max_tokens"
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    called = client.messages.create(model="demo", messages=HELLO, max_tokens=200, tools=tools,
                                    tool_choice={"type": "tool", "name": "weather",
                                                 "disable_parallel_tool_use": True})
    assert called.stop_reason == "tool_use" and 1 <= called.content[-1].input["days"] <= 9
    assert client.messages.count_tokens(model="demo", messages=HELLO).input_tokens > 3
    with pytest.raises(module.NotFoundError, match="not served here"):
        client.messages.create(**{**asked, "model": "other"})
    client.close()


def test_the_examples_of_the_page(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    if not PAGE.is_file():
        pytest.skip("no checkout: the pages are not installed")
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 3
    for code in found:
        pytest.importorskip(code.split()[1])
        exec(compile(code.replace("http://localhost:8080", running.url), str(PAGE), "exec"), names := dict[str, Any]())
        client = names["client"]
        (client.close if hasattr(client, "close") else client._client.close)()
        assert capsys.readouterr().out.strip()
