"""The flags of `bullet serve`: each does something, or says by name what to do instead."""

import argparse
import logging
from pathlib import Path

import pytest

from bulletserve.commands import serve
from bulletserve.commands.foreign_flags import _ALWAYS, _INSTEAD, _ONLY
from bulletserve.commands.options import engine_config
from bulletserve.commands.server_options import API_KEY_VARIABLE, server_settings
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.server.settings import ServerSettings


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    return parser.parse_args(words)


def settings(*words: str) -> ServerSettings:
    return server_settings(parsed(*words), "model", Slo())


@pytest.fixture(autouse=True)
def no_key_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def test_without_flags_a_server_is_closed() -> None:
    assert settings() == ServerSettings(("model",))
    assert settings().allowed_origins == () and settings().host == "127.0.0.1"
    assert not settings().cache_reset and not settings().request_templates


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--root-path", "/llm"], "root_path", "/llm"),
        (["--max-waiting", "7"], "max_waiting", 7),
        (["--max-queued-requests", "7"], "max_waiting", 7),
        (["--max-waiting-queue-length", "7"], "max_waiting", 7),
        (["--body-limit-mib", "0.5"], "body_limit_bytes", 2**19),
        (["--body-timeout", "2"], "body_timeout_s", 2),
        (["--header-timeout", "2"], "header_timeout_s", 2),
        (["--write-timeout", "2"], "write_timeout_s", 2),
        (["--health-timeout", "2"], "status_limit_s", 2),
        (["--step-timeout", "2"], "step_limit_s", 2),
        (["--shutdown-timeout", "0"], "grace_s", 0),
        (["--allowed-origins", "*"], "allowed_origins", ("*",)),
        (["--allowed-origins", '["https://a.org", "http://b"]'], "allowed_origins", ("https://a.org", "http://b")),
        (["--served-model-name", "a", "b"], "served_names", ("a", "b")),
        (["--api-key", "a", "--api-key", "b"], "api_keys", ("a", "b")),
        (["--trust-request-chat-template"], "request_templates", True),
        (["--enable-cache-reset"], "cache_reset", True),
    ],
)
def test_each_flag_sets_what_it_says(words: list[str], name: str, value: object) -> None:
    assert getattr(settings(*words), name) == value
    assert getattr(settings(), name) != value


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--context-length", "77"], "max_model_len", 77),
        (["--max-running-requests", "5"], "max_num_seqs", 5),
        (["--page-size", "32"], "block_size", 32),
        (["--random-seed", "3"], "seed", 3),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], "enable_prefix_caching", True),
    ],
)
def test_names_of_other_servers_for_the_same_thing(words: list[str], name: str, value: object) -> None:
    assert getattr(engine_config(parsed(*words), "static_split"), name) == value


def test_keys_come_from_a_file_and_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv(API_KEY_VARIABLE, "three")
    assert set(settings("--api-key-file", str(tmp_path / "keys")).api_keys) == {"one", "two", "three"}


@pytest.mark.parametrize("flag", sorted(_INSTEAD))
def test_what_we_never_do_is_refused_by_name(flag: str) -> None:
    for words in ([flag], [flag, "5"], [f"{flag}=5"]):
        with pytest.raises(ConfigError, match=flag):
            parsed(*words)


@pytest.mark.parametrize("flag", sorted(_ONLY))
def test_flags_with_one_possible_value(flag: str) -> None:
    parsed(flag, _ONLY[flag][0])
    with pytest.raises(ConfigError, match=flag):
        parsed(flag, "fp8")


@pytest.mark.parametrize("flag", sorted(_ALWAYS))
def test_what_we_always_do_may_be_asked_for(flag: str) -> None:
    assert settings(flag) == settings()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--body-timeout", "0"], "--body-timeout"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--max-waiting", "1000001"], "--max-waiting"),
        (["--max-queued-requests", "1000001"], "--max-waiting"),
        (["--body-timeout", "1e300"], "--body-timeout"),
        (["--body-limit-mib", "1e300"], "--body-limit-mib"),
        (["--shutdown-timeout", "1e300"], "--shutdown-timeout"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--root-path", "llm"], "--root-path"),
        (["--root-path", "/llm/"], "--root-path"),
        (["--allowed-origins", "example.org"], "https://"),
        (["--allowed-origins", "[x"], "JSON"),
        (["--api-key-file", "/nothing/there"], "--api-key-file"),
        (["--api-key", ""], "empty"),
    ],
)
def test_values_that_cannot_work(words: list[str], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        settings(*words)


def test_a_model_has_one_name_and_a_revision_needs_the_hub(tmp_path: Path) -> None:
    assert serve._model(parsed("--model", "org/x")) == serve._model(parsed("org/x")) == "org/x"
    assert serve._model(parsed("--model-path", "org/x", "--revision", "v1")) == "org/x@v1"
    for words in (["a", "--model", "b"], ["--revision", "v1"], [str(tmp_path), "--revision", "v1"]):
        with pytest.raises(ConfigError):
            serve._model(parsed(*words))


def test_the_http_library_logs_at_its_own_level() -> None:
    level, root = logging.getLogger("uvicorn").level, logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    try:
        serve._set_up_log(parsed())
        assert logging.getLogger("uvicorn").level == logging.WARNING
        serve._set_up_log(parsed("--uvicorn-log-level", "info"))
        assert logging.getLogger("uvicorn").level == logging.INFO
    finally:
        logging.getLogger("uvicorn").setLevel(level)
        root.handlers[:] = handlers
        root.setLevel(root_level)
