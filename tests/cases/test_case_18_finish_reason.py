"""Case 18: every answer says why it ended, once, the same in a stream as in one document."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import SETTINGS, Served
from tests.server.small_model import small_checkpoint
from tests.server.sse import ends, events
from tests.server.test_tools import SHOWING

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = small_checkpoint(tmp_path_factory.mktemp("tools"), template=SHOWING)
    server = Served(checkpoint, replace(SETTINGS, tool_call_parser="hermes"))
    yield server
    server.close()


def ended(served: Served, **body: Any) -> tuple[str, object]:
    """Why a chat ended, asked for in both ways."""
    (choice,) = served.chat(**body).json()["choices"]
    ((_, reason, stopped_by),) = ends(events(served.chat(stream=True, **body)))
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stopped_by)
    return reason, stopped_by


def test_case_18_natural_end(served: Served) -> None:
    served.say("hello")
    assert ended(served) == ("stop", None)


def test_case_18_the_end_token_is_the_last_allowed(served: Served) -> None:
    served.say("hello")
    tokens = len(served.codec.encode("hello", add_special_tokens=False))
    assert ended(served, max_tokens=tokens + 1) == ("stop", None)


def test_case_18_max_tokens(served: Served) -> None:
    served.say("hello world")
    assert ended(served, max_tokens=2) == ("length", None)


def test_case_18_the_context_is_full(served: Served) -> None:
    served.say("x" * 1000)
    assert ended(served) == ("length", None)


def test_case_18_a_stop_string(served: Served) -> None:
    served.say("one two three")
    assert ended(served, stop=["two"]) == ("stop", "two")


def test_case_18_a_stop_id(served: Served) -> None:
    served.say("one two three")
    stop = served.codec.encode(" three", add_special_tokens=False)[-1]
    assert ended(served, stop_token_ids=[stop]) == ("stop", stop)


def test_case_18_a_tool_call_that_is_complete(served: Served) -> None:
    served.say(CALL)
    assert ended(served, tools=TOOLS) == ("tool_calls", None)
    assert ended(served, tools=TOOLS, tool_choice="none") == ("stop", None)


def test_case_18_a_tool_call_that_is_cut_off(served: Served) -> None:
    served.say(CALL)
    tokens = len(served.codec.encode(CALL, add_special_tokens=False))
    assert ended(served, tools=TOOLS, max_tokens=tokens - 25) == ("length", None)


def test_case_18_ignore_eos(served: Served) -> None:
    served.say("hello")
    assert ended(served, ignore_eos=True, max_tokens=9) == ("length", None)
