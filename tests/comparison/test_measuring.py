"""Runs that are kept are not run again, others are never mixed in, and none is begun that would not end in time."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.comparison.arm_run import OutOfTime, TimedPrompt
from bulletserve.comparison.campaign import around_goodput, at_rates
from bulletserve.comparison.measuring import Measuring, Requests
from bulletserve.comparison.run_folder import RunFolder, RunName
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.simulator.goodput_search import bracket, place_of, rate_at
from bulletserve.telemetry.goodput import MOST_APART, Met, goodput
from tests.comparison.device import COUNT, Device

SLO = Slo("tight", 0.3, 0.01)


def requests() -> Requests:
    def prompts(rate: float, number: int) -> list[TimedPrompt]:
        return [TimedPrompt((at + 1) / rate, [1], 5) for at in range(COUNT)]

    return Requests("list", COUNT, "digest", 0, prompts)


def measuring(folder: Path | None = None, **more: Any) -> Measuring:
    kept = None if folder is None else RunFolder(folder, {"device": "card"})
    return Measuring(None, requests(), SLO, folder=kept, **more)  # type: ignore[arg-type]


def test_what_is_kept_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, a=10.0)
    first = measuring(tmp_path).measured("a", 9.0)
    again = measuring(tmp_path)
    assert again.measured("a", 9.0) == first and len(device.ran) == 1
    assert again.folder is not None and again.folder.told == []
    for other in (again.measured("a", 9.5), again.measured("a", 9.0, 1), again.measured("b", 9.0)):
        assert other.scored and (other.policy, other.rate, other.round) != ("a", 9.0, 0)
    assert len(device.ran) == 4
    document = json.loads(next(tmp_path.glob("*_at_9_*.json")).read_text())
    assert document["commit"] and document["versions"]["python"] and document["fingerprint"] == device.of_code


def test_runs_of_other_code_are_told_and_neither_used_nor_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, a=10.0)
    measuring(tmp_path).measured("a", 9.0)
    device.of_code = {"code": "2", "device": "card"}
    second = measuring(tmp_path)
    second.measured("a", 9.0)
    assert len(device.ran) == 2 and len(list(tmp_path.glob("*.json"))) == 2
    assert second.folder is not None
    (told,) = second.folder.told
    assert told.startswith("list_a_at_9_") and told.endswith(" is not used: other code")
    device.of_code = {"code": "1", "device": "card"}
    measuring(tmp_path).measured("a", 9.0)
    assert len(device.ran) == 2, "the first one is still there"


def passed_over(folder: Path, device: Device, path: Path) -> str:
    """Run again what `path` holds; what was said of it."""
    ran = len(device.ran)
    again = measuring(folder)
    made = again.measured("a", 1.0)
    assert len(device.ran) == ran + 1 and again.folder is not None
    (told,) = again.folder.told
    assert told.startswith(f"{path.name} is not what its name says, by its ")
    assert measuring(folder).measured("a", 1.0) == made and len(device.ran) == ran + 1, "it was written anew"
    return told


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"run": 1, "scored": 2}', "{" * 5000])
def test_a_damaged_run_is_made_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    measuring(tmp_path).measured("a", 1.0)
    (path,) = tmp_path.glob("*.json")
    path.write_text(damage)
    assert "content" in passed_over(tmp_path, device, path)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('"rate_req_s": 1.0', '"rate_req_s": 2.0', "run"),
        ('"round": 0', '"round": 1e999', "content (OverflowError"),
        ('"round": 0', '"round": 1', "run"),
        ('"code": "1"', '"code": "2"', "fingerprint"),
        ('"window_s"', '"other_s"', "content (ValueError: metrics without window_s"),
        ('"both_lanes_x": 0.0', '"both_lanes_x": 1e999', "content (ValueError"),
    ],
)
def test_a_run_that_is_not_what_its_name_says_is_made_again(
    old: str, new: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    measuring(tmp_path).measured("a", 1.0)
    (path,) = tmp_path.glob("*.json")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert f"by its {part}" in passed_over(tmp_path, device, path)


def test_a_run_with_fewer_lines_or_of_another_name_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    measuring(tmp_path).measured("a", 1.0)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    for lines in ([], document["scored"]["lines"][:-1]):
        path.write_text(json.dumps(document | {"scored": document["scored"] | {"lines": lines}}))
        assert f"({len(lines)}, not 160)" in passed_over(tmp_path, device, path)
    measuring(tmp_path).measured("b", 1.0)
    (other,) = tmp_path.glob("list_b_*.json")
    path.write_text(other.read_text())
    assert "by its run:" in passed_over(tmp_path, device, path)


def test_a_run_that_cannot_be_written_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    (tmp_path / "file").touch()
    one = measuring(tmp_path / "file")
    assert one.measured("a", 1.0).scored and one.measured("a", 2.0).scored
    assert [line.split(":")[0] for line in one.unwritten] == [
        "a run of a at 1 req/s is not kept",
        "a run of a at 2 req/s is not kept",
    ]


def test_no_run_is_begun_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 of 240 arrivals at 2 a second, then an answer of 5 tokens within 0.35 s, then a second around it."""
    device = Device(monkeypatch)
    with pytest.raises(OutOfTime):
        measuring(until_s=101.3).measured("a", 2.0)
    assert device.ran == []
    measuring(until_s=121.4).measured("a", 2.0)
    assert len(device.ran) == 1


def test_a_run_that_no_call_has_time_for_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 100.35 s, and a second around it."""
    device = Device(monkeypatch)
    with pytest.raises(ConfigError, match=r"a at 2 req/s takes about 101 s, more than the 101 s of --time-limit: name"):
        measuring(until_s=101.0, limit_s=101.0).measured("a", 2.0)
    with pytest.raises(OutOfTime):
        measuring(until_s=101.0, limit_s=102.0).measured("a", 2.0)
    assert device.ran == []


def test_rates_that_are_close_have_names_of_their_own() -> None:
    stems = [RunName("list", "a", rate, 0, 0).stem for rate in (10.0, 10.001, 10.002, 10.0000001)]
    assert stems[:2] == ["list_a_at_10", "list_a_at_10_001"] and len(set(stems)) == 4


def test_runs_that_take_longer_are_expected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.slowness = 3.0
    slow = measuring(until_s=1e4)
    slow.measured("a", 2.0)
    slow.until_s = device.begun_s + 300.0
    with pytest.raises(OutOfTime):
        slow.measured("b", 2.0)
    assert len(device.ran) == 1, "not begun"


def test_a_comparison_in_pieces_comes_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, a=10.0, b=8.0)
    whole = at_rates(measuring(), ["a", "b"], [8.0, 9.0], 2)
    assert [one.split()[0] for one in device.ran] == ["a", "b", "b", "a"] * 2, "what drifts drifts for all"
    pieces = 0
    while True:
        pieces += 1
        found = at_rates(measuring(tmp_path, until_s=device.begun_s + 70.0), ["a", "b"], [8.0, 9.0], 2)
        assert (found.left == []) == (len(list(tmp_path.glob("*.json"))) == 8)
        if not found.left:
            break
    assert 3 < pieces < 9 and found == whole and len(device.ran) == 16


def test_what_is_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    found = at_rates(measuring(tmp_path, until_s=1.0), ["a", "b"], [8.0], 2)
    assert found.left == ["a at 8 req/s", "b at 8 req/s", "b at 8 req/s, round 2", "a at 8 req/s, round 2"]
    search = around_goodput(measuring(tmp_path, until_s=1.0), ["a"], [8.0], bisect=False)
    assert search.left == ["the search for the goodput of a"] and search.runs == {"a": []}


def test_a_policy_at_fault_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, b=8.0)
    device.failing = {"a"}
    one = measuring()
    found = at_rates(one, ["a", "b"], [7.0, 8.0])
    assert found.runs["a"] == [] and len(found.runs["b"]) == 2 and found.left == []
    assert {policy: str(error) for policy, error in one.failed.items()} == {"a": "a failed"}
    assert around_goodput(one, ["a", "b"], [8.0, 8.0], bisect=True).runs["a"] == []


@pytest.mark.parametrize(("near", "runs"), [(10.0, 2), (9.2, 4), (11.0, 4)])
def test_two_rates_around_a_crossing_and_more_where_it_is_elsewhere(
    near: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(monkeypatch, a=10.0)
    found = around_goodput(measuring(), ["a"], [near], bisect=False)
    curve = {one.rate: one.met(SLO) for one in found.runs["a"]}
    assert len(curve) <= runs and goodput(curve) == pytest.approx(10.0, rel=0.03)


def test_a_search_finds_the_crossing_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, a=10.0)
    found = around_goodput(measuring(), ["a"], [5.0], bisect=True)
    assert goodput({one.rate: one.met(SLO) for one in found.runs["a"]}) == pytest.approx(10.0, rel=0.02)


@given(edge=st.floats(5.0, 20.0), off=st.floats(0.9, 1.1))
@settings(max_examples=100, deadline=None)
def test_a_bracket_has_the_edge_between_two_rates_that_may_be_interpolated(edge: float, off: float) -> None:
    asked: list[int] = []

    def run(place: int) -> Met:
        asked.append(place)
        return np.full(160, rate_at(place) <= edge)

    found = bracket(run, place_of(edge * off))
    rates = sorted(found)
    assert len(asked) == len(set(asked)) == len(found) <= 6
    assert all(high < low * MOST_APART for low, high in itertools.pairwise(rates))
    if abs(off - 1.0) < 0.05:
        assert len(found) <= 4
    if len(found) < 6:
        assert rates[0] <= edge < rates[-1]
