"""The client that most people use, against a real socket."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.conftest import Served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(served: Served, client: openai.OpenAI) -> None:
    served.say("hello world")
    answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_chat_stream(served: Served, client: openai.OpenAI) -> None:
    served.say("hello \U0001f469 world")
    with client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello \U0001f469 world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_completion_stream(served: Served, client: openai.OpenAI) -> None:
    served.say("hello world")
    with client.completions.create(model="small", prompt=["a", "b"], stream=True) as stream:
        chunks = list(stream)
    for index in (0, 1):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) == "hello world"


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["small", "small-alias"]
    assert models[0].model_dump()["max_model_len"] == 256
    assert client.models.retrieve("small-alias").id == "small-alias"


def test_errors_have_the_classes_that_callers_catch(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served: small"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="a", max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"


def test_a_stream_that_breaks_off_raises(fresh: Served) -> None:
    fresh.engine.script = lambda request: fresh.codec.encode("ab") * 100
    fresh.engine.pause_s = 0.01
    with (
        openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(model="small", prompt="a", max_tokens=200, stream=True) as stream,
    ):
        assert next(iter(stream)).choices[0].text
        fresh.engine.die("gone")
        with pytest.raises(openai.APIError, match="gone"):
            list(stream)


def test_leaving_a_stream_early(served: Served, client: openai.OpenAI) -> None:
    served.engine.script = lambda request: served.codec.encode("ab") * 100
    served.engine.pause_s = 0.01
    with client.completions.create(model="small", prompt="a", max_tokens=200, stream=True) as stream:
        next(iter(stream))
    served.wait_until(lambda: not served.engine.running)
    assert len(served.engine.aborted) == 1
