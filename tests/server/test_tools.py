"""Tools over HTTP: what is refused, what the model is shown, and how calls look to the openai client."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.formats.description import Checkpoint
from bulletserve.grammar.texts import ANY_OBJECT, json_grammar
from tests.server.conftest import SETTINGS, Served
from tests.server.small_model import TEMPLATE, small_checkpoint
from tests.server.sse import events

SHOWING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|open|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}[{{ call['function']['name'] }}:{{ call['function']['arguments']['x'] }}]"
    "{% endfor %}<|close|>\n{% endfor %}<|open|>assistant\n"
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "see",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
BARE = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint: Checkpoint = small_checkpoint(tmp_path_factory.mktemp("tools"), template=SHOWING)
    served = Served(checkpoint, replace(SETTINGS, tool_call_parser="hermes"))
    yield served
    served.close()


def shown(served: Served) -> str:
    """The prompt of the last request."""
    return served.codec.decode(list(served.engine.arrived[-1].prompt_ids), skip_special_tokens=False)


def test_the_model_is_shown_the_tools_and_earlier_calls(hermes: Served) -> None:
    hermes.say("fine")
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    ]
    answer = hermes.chat(messages=messages, tools=[LOOK], max_tokens=9)
    assert answer.status_code == 200, answer.text
    prompt = shown(hermes)
    assert prompt.startswith(json.dumps(LOOK))
    assert "<|open|>assistant\n[look:3]<|close|>\n<|open|>tool\nb<|close|>" in prompt


def test_half_of_a_surrogate_pair_that_only_the_template_shows(hermes: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": "\\ud800"}'}}
    answer = hermes.chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "half of a surrogate pair" in error["message"] and error["param"] == "messages"


def test_a_call_in_one_document(hermes: Served) -> None:
    hermes.say(f"Well. {CALL}")
    choice = hermes.chat(tools=[LOOK]).json()["choices"][0]
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"x": 7}'}
    assert (call["type"], choice["finish_reason"]) == ("function", "tool_calls")


def test_a_call_in_a_stream_as_the_openai_client_reads_it(hermes: Served) -> None:
    hermes.say(CALL + CALL)
    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "hello"}],
        tools=[BARE],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    names: list[str] = []
    arguments: dict[int, list[str]] = {}
    last = None
    for chunk in stream:
        for choice in chunk.choices:
            last = choice.finish_reason or last
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.function.name:
                    assert call.id
                    assert call.index == len(names)
                    names.append(call.function.name)
                arguments.setdefault(call.index, []).append(call.function.arguments or "")
            assert not choice.delta.content
    assert names == ["look", "look"]
    assert [json.loads("".join(pieces)) for pieces in arguments.values()] == [{"x": 7}] * 2
    assert len(arguments[0]) > 3, "the arguments grow as they are written"
    assert last == "tool_calls"
    assert chunk.usage is not None


@pytest.mark.parametrize("said", ["hello there", f"Well. {CALL}{CALL} So.", CALL, "<tool_call>none"])
@pytest.mark.parametrize("several_calls", [True, False])
def test_every_token_of_a_stream_is_told_of_once(hermes: Served, said: str, several_calls: bool) -> None:
    hermes.say(said)
    body: dict[str, Any] = {"tools": [LOOK], "logprobs": True, "top_logprobs": 1, "parallel_tool_calls": several_calls}
    whole = hermes.chat(**body).json()["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in whole] == [-float(place) for place in range(len(whole))]
    assert len(whole) == hermes.chat(**body).json()["usage"]["completion_tokens"]
    choices = [choice for chunk in events(hermes.chat(**body, stream=True)) for choice in chunk["choices"]]
    told = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"] is not None]
    assert [one for several in told for one in several] == whole
    assert all(told) and len(told) > 1, "as the stream goes on, not all at its end"


def test_one_call_at_most_without_parallel_calls(hermes: Served) -> None:
    hermes.say(CALL + CALL)
    message = hermes.chat(tools=[LOOK], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_free_text_streams_token_by_token_beside_tools(hermes: Served) -> None:
    hermes.say("hello there")
    chunks = events(hermes.chat(tools=[LOOK], stream=True))
    said = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(said) == "hello there"
    assert len([text for text in said if text]) > 4
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [("none", False), ("auto", False), ("required", True), ({"type": "function", "function": {"name": "look"}}, True)],
)
def test_required_and_named_tools_are_kept_by_a_grammar(hermes: Served, choice: Any, grammar: bool) -> None:
    hermes.say('[{"name": "look", "parameters": {"x": 1}}]' if choice == "required" else '{"x": 1}')
    answer = hermes.chat(tools=[LOOK], tool_choice=choice).json()["choices"][0]
    assert bool(hermes.engine.arrived[-1].grammar) is grammar
    calls = answer["message"].get("tool_calls", [])
    assert [call["function"] for call in calls] == [{"name": "look", "arguments": '{"x": 1}'}] * grammar


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_gets_no_arguments(hermes: Served, named: bool, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    call = {"type": "object", "properties": {"name": {"const": "look"}, "parameters": nothing}}
    call |= {"required": ["name", "parameters"], "additionalProperties": False}
    schema = nothing if named else {"type": "array", "minItems": 1, "items": {"anyOf": [call]}}
    hermes.say("{}")
    choice = {"type": "function", "function": {"name": "look"}} if named else "required"
    assert hermes.chat(tools=[tool], tool_choice=choice).status_code == 200
    assert hermes.engine.arrived[-1].grammar == json_grammar(schema, "tools")


def test_what_arguments_name_is_all_they_have_and_formats_stay_open(hermes: Served) -> None:
    hermes.say("{}")
    schema = LOOK["function"]["parameters"]  # type: ignore[index]
    choice = {"type": "function", "function": {"name": "look"}}
    assert hermes.chat(tools=[LOOK], tool_choice=choice).status_code == 200
    assert '"additionalProperties":false' in hermes.engine.arrived[-1].grammar
    assert hermes.chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}}).status_code == 200
    assert "additionalProperties" not in hermes.engine.arrived[-1].grammar


def both_ways(served: Served, **body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """The content, calls and end of an answer, which are the same whole and streamed."""
    whole = served.chat(**body).json()["choices"][0]
    message = whole["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    choices = [choice for chunk in events(served.chat(**body, stream=True)) for choice in chunk["choices"]]
    told: list[list[str]] = []
    for function in (call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])):
        if "name" in function:
            told.append([function["name"], ""])
        told[-1][1] += function["arguments"]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert (content, [(name, text) for name, text in told]) == (message["content"] or "", calls)
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    return content, calls, whole["finish_reason"]


def test_a_list_of_calls_that_is_cut_off_is_no_content(hermes: Served) -> None:
    text = '[{\n    "name": "look", "parameters": {"x": 17}}]'
    hermes.say(text)
    for most in range(1, len(text)):
        content, calls, end = both_ways(hermes, tools=[LOOK], tool_choice="required", max_tokens=most)
        assert (content, end) == ("", "length")
        assert calls in ([], [("look", '{"x": 17}'[: len(calls and calls[0][1])])])


@pytest.mark.parametrize("arguments", ['{"x" 1}', '{"x": 1', "{", "[1]", "3", "", None, "null", '"x"'])
def test_calls_are_taken_back_whatever_their_arguments_are(hermes: Served, arguments: str | None) -> None:
    """They are what a model wrote: an agent that sends its history again must not be stopped by it."""
    hermes.say("fine")
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert hermes.chat(messages=[message], max_tokens=4).status_code == 200
    assert "[look:]" in shown(hermes)


def test_a_broken_call_of_the_models_can_be_sent_back(hermes: Served) -> None:
    hermes.say('<tool_call>{"name": "look", "arguments": {"x" 1}}</tool_call>')
    _, calls, _ = both_ways(hermes, tools=[LOOK])
    assert calls == [("look", '{"x" 1}')]
    message = hermes.chat(tools=[LOOK]).json()["choices"][0]["message"]
    assert hermes.chat(messages=[message], tools=[LOOK]).status_code == 200


AS_JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ('{"a": 1}', '{"a": 1}', 0),
        ('{"a": "<tool_call>{}</tool_call>"}', '{"a": "<tool_call>{}</tool_call>"}', 0),
        ("<tool_c", "<tool_c", 0),
        ("", "", 0),
        (CALL, "", 1),
        (f"{CALL}\n{CALL}", "", 2),
    ],
)
def test_a_format_beside_tools_is_for_answers_that_call_none(
    hermes: Served, said: str, content: str, calls: int
) -> None:
    hermes.say(said)
    end = "tool_calls" if calls else "stop"
    assert both_ways(hermes, tools=[BARE], **AS_JSON) == (content, [("look", '{"x": 7}')] * calls, end)
    assert "@marked" in hermes.engine.arrived[-1].grammar


def test_nothing_of_a_call_beside_a_format_is_content(hermes: Served) -> None:
    hermes.say(CALL)
    for most in range(len("<tool_call>"), 40):
        content, calls, end = both_ways(hermes, tools=[LOOK], max_tokens=most, **AS_JSON)
        assert (content, end) == ("", "length")
        assert len(calls) <= 1


@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_beside_a_format_is_that_of_the_model(hermes: Served, parallel: bool) -> None:
    hermes.say("{}")
    assert hermes.chat(tools=[LOOK], parallel_tool_calls=parallel, **AS_JSON).status_code == 200
    grammar = hermes.engine.arrived[-1].grammar
    assert '"arguments"' in grammar and "<tool_call>" in grammar and '"additionalProperties": false' in grammar
    assert ("one)*" in grammar) is parallel


def test_choices_that_leave_nothing_open_decide_what_the_format_is_for(hermes: Served) -> None:
    hermes.say("[]")
    for choice, grammar in (("none", json_grammar(ANY_OBJECT, "x")), ("required", None), (NAMED, None)):
        alone = hermes.chat(tools=[LOOK], tool_choice=choice)
        wanted = grammar or hermes.engine.arrived[-1].grammar
        assert alone.status_code == hermes.chat(tools=[LOOK], tool_choice=choice, **AS_JSON).status_code == 200
        assert hermes.engine.arrived[-1].grammar == wanted


def test_where_a_call_may_look_as_an_answer_does(tmp_path: Path) -> None:
    served = Served(small_checkpoint(tmp_path, template=SHOWING), replace(SETTINGS, tool_call_parser="llama3_json"))
    try:
        error = refused(served, tools=[LOOK], **AS_JSON)
        assert error["param"] == "tool_choice" and '"required"' in error["message"]
    finally:
        served.close()


def refused(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.chat(**body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_what_is_no_tool_is_refused(hermes: Served) -> None:
    def tool(**function: Any) -> dict[str, Any]:
        return {"type": "function", "function": function}

    for tools in ({}, "look", [{}], [None], [tool()], [tool(name="a b")], [tool(name="a", parameters=3)], [LOOK, LOOK]):
        assert refused(hermes, tools=tools)["param"] == "tools"
    for choice in ("sometimes", 3, {"type": "function", "function": {"name": "jump"}}, {"type": "function"}):
        assert refused(hermes, tools=[LOOK], tool_choice=choice)["param"] == "tool_choice"
    assert refused(hermes, tool_choice="required")["param"] == "tool_choice"
    odd = tool(name="a", parameters={"type": "strange"})
    assert refused(hermes, tools=[odd], tool_choice="required")["param"] == "tools"
    for call in (3, {}, {"function": {"name": 3}}):
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert refused(hermes, messages=[message])["param"] == "messages"


def test_auto_needs_a_parser(served: Served) -> None:
    error = refused(served, tools=[LOOK])
    assert "--tool-call-parser" in error["message"]
    served.say("[]")
    assert served.chat(tools=[LOOK], tool_choice="none").status_code == 200
    assert served.chat(tools=[LOOK], tool_choice="required").status_code == 200


@pytest.fixture
def blind(checkpoint: Checkpoint) -> Iterator[Served]:
    """A model whose template does not show tools."""
    served = Served(checkpoint, replace(SETTINGS, tool_call_parser="hermes", request_templates=True))
    yield served
    served.close()


def test_tools_that_the_template_does_not_show(blind: Served, caplog: pytest.LogCaptureFixture) -> None:
    blind.say("[]")
    for body in ({}, {"tool_choice": "auto"}):
        error = refused(blind, tools=[LOOK], **body)
        assert error["param"] == "tool_choice" and "--chat-template" in error["message"]
    assert not caplog.records
    for choice in ("none", "required", {"type": "function", "function": {"name": "look"}}):
        assert blind.chat(tools=[LOOK], tool_choice=choice).status_code == 200
    assert caplog.text.count("does not show the model tools") == 1
    assert blind.chat(tools=[LOOK], chat_template=SHOWING).status_code == 200
    assert refused(blind, tools=[LOOK], chat_template="x")["param"] == "tool_choice"


def test_calls_that_the_template_does_not_show(blind: Served, hermes: Served, caplog: pytest.LogCaptureFixture) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    ]
    for served in (hermes, blind):
        served.say("fine")
        assert not caplog.records
        for messages in ([], history[:1], history[1:], history):
            body = {"messages": [{"role": "user", "content": "a"}, *messages]}
            assert served.chat(**body, max_tokens=4).status_code == 200
    assert caplog.text.count("does not show the model earlier tool calls") == len(caplog.records) == 1


@pytest.mark.parametrize("template", [None, TEMPLATE, SHOWING])
def test_the_operator_is_told_at_the_start(
    tmp_path: Path, template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for parser in (None, "hermes"):
        settings = replace(SETTINGS, tool_call_parser=parser)
        Served(small_checkpoint(tmp_path, template=template), settings).close()
        told = "no chat template that shows the model tools" in caplog.text
        assert told is (parser is not None and template != SHOWING)


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of hermes"):
        replace(SETTINGS, tool_call_parser="other")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("depth", [150, 300, 480, 900])
def test_parameters_that_are_nested_too_deeply(hermes: Served, choice: Any, depth: int) -> None:
    parameters = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
    tool = f'{{"type": "function", "function": {{"name": "look", "parameters": {parameters}}}}}'
    content = (
        f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{tool}], "tool_choice": {json.dumps(choice)}}}'
    )
    answer = httpx.post(f"{hermes.url}/v1/chat/completions", content=content)
    assert answer.status_code == 400, answer.text
    assert "nested too deeply" in answer.text or "recursion limit" in answer.text, answer.text
