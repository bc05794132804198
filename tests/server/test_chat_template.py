import pytest

from bulletserve.core.errors import ConfigError, InvalidRequest
from bulletserve.server.chat_template import ChatTemplate

USER = [{"role": "user", "content": "<hi> & 'you' \u00e9"}]


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(USER, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s><hi> & 'you' \u00e9</s>"),
        ("{% if add_generation_prompt %}yes{% endif %}", "yes"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<hi> & \'you\' \u00e9"}'),
        ("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}", "x\n"),
        ("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "01"),
        ("{% generation %}answer{% endgeneration %}", "answer"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{{ nothing }}{{ nothing is defined }}", "False"),
    ],
)
def test_what_template_authors_count_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_of_the_request() -> None:
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    assert render("{% if add_generation_prompt %}yes{% endif %}", add_generation_prompt=False) == ""


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools"])
def test_variables_cannot_replace_what_the_request_says_elsewhere(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        render("x", variables={name: []})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_the_requests_fault(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        render(source)
    assert caught.value.param == "messages"


FOR_MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
FOR_CALLS = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "tools", "calls"),
    [
        (FOR_MESSAGES, False, False),
        ("{# tools, tool_calls #}{% if tools %}{% endif %}" + FOR_MESSAGES, False, False),
        ("{{ tools | tojson if tools }}" + FOR_CALLS, True, True),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}" + FOR_MESSAGES, True, False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + FOR_MESSAGES, True, True),
        ("{{ raise_exception('roles must alternate') }}", True, True),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", False, False),
        (
            "{% for m in messages %}{{ tools if loop.last and m.role == 'user' }}{{ m.content }}{% endfor %}",
            True,
            False,
        ),
    ],
)
def test_what_a_template_shows_is_seen_in_its_text(source: str, tools: bool, calls: bool) -> None:
    template = ChatTemplate(source, {})
    assert (template.shows_tools, template.shows_calls) == (tools, calls)


def test_a_template_that_does_not_compile_is_the_operators_fault() -> None:
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplate("{% if %}", {})
