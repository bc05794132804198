"""The bar on the terminal, the file of lines when the disk is full, and a server whose engine dies."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bulletserve.client import measure
from bulletserve.client.measure import RequestLines, Wanted
from bulletserve.client.prompts import TimedPrompt
from bulletserve.client.replay import Progress
from bulletserve.client.report import RateResult, remarks
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from tests.client.fake_server import STREAM, FakeServer, answers, event, says, status, token


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_tells_how_far_a_run_is_and_only_to_a_terminal(is_terminal: bool) -> None:
    shown = io.StringIO()
    with measure._bar(Console(file=shown, force_terminal=is_terminal, width=120)) as bar:
        move = measure._mover(bar, 12.5)
        move(Progress(total=40, sent=30, ended=20, tokens=1234))
        move(Progress(total=40, sent=31, ended=25, tokens=2345, failed=3))
    text = shown.getvalue()
    if is_terminal:
        assert "12.5 req/s" in text and "20/40 ended, 10 open, 1234 tokens" in text and "3 failed" in text
    else:
        assert not text.strip()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_file_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with RequestLines(Path("/dev/full")) as lines:
        lines.add({"number": 1})
        lines.add({"number": 2})
    assert capsys.readouterr().err.count("no more is written there") == 1


def test_a_file_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jsonl"):
        RequestLines(tmp_path / "none" / "lines.jsonl")


def test_an_engine_that_dies_behind_a_server_is_told_apart_from_refusals() -> None:
    error = event({"error": {"message": "the engine died"}})
    scripts = [answers(), status(503, b"{}"), says(STREAM, token(), error)]
    with FakeServer(lambda number, body: scripts[number % 3]) as server:
        prompts = [TimedPrompt(number, 0.0, (1, 2), 2, 3) for number in range(6)]
        wanted = Wanted(f"{server.url}/v1", None, 30.0, "fake", False, {}, Slo("none"))
        results: list[RateResult] = []
        with RequestLines(None) as lines:
            measure.measure(wanted, lambda run: prompts, (100.0,), lines, results)
    (one,) = results
    assert one.broken == one.kinds["error_event"] == 2 and not one.server_gone
    (said,) = (text for text in remarks(results, 10.0) if "broken off" in text)
    assert "2 of 6" in said and "it answers now" in said
