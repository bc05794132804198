"""Recorded runs: decided again without a difference; whatever was done to the file is found, by its line."""

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from bulletserve import cli
from bulletserve.core.errors import RecordError
from bulletserve.core.plan import Plan
from bulletserve.core.slo import Slo
from bulletserve.scheduler.policies import POLICIES
from bulletserve.scheduler.queue_rules import QueueRules
from bulletserve.scheduler.replay import Difference, RecordedEngine, Replay, as_kept_by
from bulletserve.simulator.experiment import run_arm
from bulletserve.telemetry.record_format import Record, Turn
from bulletserve.telemetry.recorder import Recorder
from bulletserve.workload.request_list import lognormal_requests
from tests.scheduler.cases import cases
from tests.scheduler.forecasters import FORECASTS
from tests.scheduler.random_policy import RandomPolicy
from tests.scheduler.world import Case, World
from tests.simulator.devices import h200

REQUESTS = lognormal_requests(25, seed=3)
SPECS = (*POLICIES, "time_sliced:ordering=slack,admission=timely", "chunked_prefill:ordering=slack")


def record(path: Path, policy: str, rate: float = 12.0) -> Path:
    setup = h200()
    engine = RecordedEngine(policy, setup.limits, caching=False, estimator=setup.estimator)
    recorder = Recorder(path, engine.header(seed=0))
    run_arm(setup, policy, REQUESTS, rate, 0, Slo("chat", 0.3, 0.02), observer=recorder)
    recorder.close()
    assert recorder.stopped == ""
    return path


def replay(path: Path, policy: str | None = None) -> tuple[Replay, list[Difference]]:
    with Record(path) as found:
        again = Replay(RecordedEngine.from_header(found.header), policy)
        differences = list(again.differences(found.turns()))
        assert found.complete
    return again, differences


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("record") / "run.jsonl", "chunked_prefill:budget=512")


@pytest.mark.parametrize("policy", SPECS)
def test_a_recorded_run_is_decided_again_without_a_difference(policy: str, tmp_path: Path) -> None:
    again, differences = replay(record(tmp_path / "run.jsonl", policy))
    assert differences == []
    assert again.turns >= again.decisions > 200


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_any_history_leads_to_the_same_snapshots_again(case: Case) -> None:
    """Prefix hits, preemptions, aborts and failing steps included: a policy that looks at all of a snapshot says so."""

    class Remembering(RandomPolicy):
        seen: list[object]

        def decide(self, snapshot: Any, estimator: Any) -> Plan:
            self.seen.append(snapshot)
            return super().decide(snapshot, estimator)

    def remembering() -> Remembering:
        policy = Remembering(case.seed)
        policy.seen = []
        return policy

    first, second = remembering(), remembering()
    world = World(case, first)
    turns: list[Turn] = []
    world.loop.observer = lambda now_s, events, plans: turns.append(Turn(now_s, tuple(events), tuple(plans)))
    world.drain()
    again = Replay(RecordedEngine("time_sliced", case.limits, case.caching, FORECASTS))  # the world's own
    again._judge._policy = second
    assert list(again.differences(turns)) == []
    assert second.seen == first.seen


def test_another_policy_is_asked_at_every_state_that_was(recorded: Path) -> None:
    again, differences = replay(recorded, "chunked_prefill:budget=500")
    assert 0 < len(differences) < again.decisions
    first = differences[0]
    assert first.recorded.starts and first.decided.starts
    assert first.recorded.starts[0] != first.decided.starts[0]
    assert again.turns == replay(recorded)[0].turns
    assert replay(recorded, "chunked_prefill:budget=512")[1] == []


def rewrite(path: Path, to: Path, change: Callable[[list[Any]], None], *, sign: bool) -> Path:
    """A record whose bodies were changed; `sign`: with the hashes that then belong there."""
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    bodies = [row["body"] for row in rows]
    change(bodies)
    lines, last = [], b""
    for body, row in zip(bodies, rows, strict=False):
        text = msgspec.json.encode(body)
        last = blake2b(last + text, digest_size=8).hexdigest().encode()
        lines.append(b'{"body":%b,"hash":"%b"}\n' % (text, last if sign else row["hash"].encode()))
    to.write_bytes(b"".join(lines))
    return to


def started(bodies: list[Any], kind: str) -> tuple[int, list[Any]]:
    """The first plan with a start of a kind: its line, and the start."""
    for line, body in enumerate(bodies[1:-1], 2):
        for starts, *_ in body[2]:
            for start in starts:
                if start[0] == kind:
                    return line, start
    raise AssertionError


def test_a_tampered_line_is_found_by_its_hash(recorded: Path, tmp_path: Path) -> None:
    lines = []

    def other_share(bodies: list[Any]) -> None:
        line, start = started(bodies, "mixed")
        lines.append(line)
        start[2][0][1] -= 1

    changed = rewrite(recorded, tmp_path / "run", other_share, sign=False)
    with pytest.raises(RecordError, match=rf"line {lines[0]}: its hash is wrong"):
        replay(changed)


def test_a_tampered_line_with_a_right_hash_is_found_by_deciding_again(recorded: Path, tmp_path: Path) -> None:
    lines = []

    def fewer_tokens(bodies: list[Any]) -> None:
        line, start = started(bodies, "mixed")
        lines.append(line)
        start[2][-1][1] -= 1

    changed = rewrite(recorded, tmp_path / "run", fewer_tokens, sign=True)
    with Record(changed) as found:
        differences = Replay(RecordedEngine.from_header(found.header)).differences(found.turns())
        assert next(differences).line == lines[0]


def no_such_step(bodies: list[Any]) -> None:
    body = next(b for b in bodies[1:-1] for event in b[1] if event[0] == "done")
    next(event for event in body[1] if event[0] == "done")[1] = 10_000


def nobody_arrived(bodies: list[Any]) -> None:
    next(b for b in bodies[1:-1] if any(event[0] == "arrived" for event in b[1]))[1] = []


def too_many_plans(bodies: list[Any]) -> None:
    body = next(b for b in reversed(bodies[1:-1]) if b[2])
    body[2] += [[[], [], [], [], "nobody asked"]] * 9


@pytest.mark.parametrize("change", [no_such_step, nobody_arrived, too_many_plans])
def test_what_cannot_have_happened_is_named_with_its_line(
    recorded: Path, tmp_path: Path, change: Callable[[list[Any]], None]
) -> None:
    changed = rewrite(recorded, tmp_path / "run", change, sign=True)
    with pytest.raises(RecordError, match=r"line \d+"):
        replay(changed)


def test_a_header_that_describes_no_engine_is_named(recorded: Path, tmp_path: Path) -> None:
    def no_limits(bodies: list[Any]) -> None:
        del bodies[0]["limits"]

    def another_calibration(bodies: list[Any]) -> None:
        bodies[0]["calibration_hash"] = "0" * 16

    for change, message in ((no_limits, "limits"), (another_calibration, "not the one that it names")):
        changed = rewrite(recorded, tmp_path / "run", change, sign=True)
        with Record(changed) as found, pytest.raises(RecordError, match=message):
            RecordedEngine.from_header(found.header)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("limits", {"total_blocks": 10**12}),
        ("limits", {"total_blocks": 0}),
        ("limits", {"max_seqs": 10**12}),
        ("limits", {"block_size": 0}),
        ("limits", {"num_layers": -1}),
        ("limits", {"group_token_layers": 0}),
        ("limits", {"lattice": {"total_sms": 0, "partitions": []}}),
        ("limits", {"lattice": {"total_sms": 8, "partitions": []}}),
        ("limits", {"lattice": {"total_sms": 8, "partitions": [[8, 0], [0, 8], [-4, 12]]}}),
        ("limits", {"lattice": {"total_sms": 10**12, "partitions": [[10**12, 0], [0, 10**12]]}}),
        ("limits", {"num_layers": "many"}),
        ("shape", {"num_layers": 0}),
        ("shape", {"hidden_size": 10**30}),
        ("shape", {"rope_scaling": 3}),
        ("", {"dtype_bytes": 10**9}),
        ("", {"dtype_bytes": "two"}),
        ("", {"shape": []}),
        ("", {"limits": None}),
        ("", {"calibration": "[" * 100_000}),
        ("", {"policy": "no_such_policy"}),
    ],
)
def test_a_header_with_impossible_sizes_is_one_line(
    recorded: Path, tmp_path: Path, part: str, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Signed again, so that its hash is right: before anything is allocated or divided by it."""

    def impossible(bodies: list[Any]) -> None:
        (bodies[0][part] if part else bodies[0]).update(change)

    assert cli.main(["replay", str(rewrite(recorded, tmp_path / "run", impossible, sign=True))]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bullet: ") and said.count("\n") == 1


@pytest.mark.parametrize("body", [b"[" * 100_000 + b"]" * 100_000, b'[0.5,[["arrived",{"id":1}]],[]]', b"[0,[[]],[]]"])
def test_a_line_that_is_no_turn_is_named(
    recorded: Path, tmp_path: Path, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    head = recorded.read_bytes().splitlines(keepends=True)[0]
    last = msgspec.json.decode(head)["hash"].encode()
    digest = blake2b(last + body, digest_size=8).hexdigest().encode()
    (tmp_path / "run").write_bytes(head + b'{"body":%b,"hash":"%b"}\n' % (body, digest))
    assert cli.main(["replay", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "line 2: " in said and said.count("\n") == 1


def test_ids_that_no_token_has_are_named_with_their_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(bodies: list[Any]) -> None:
        arrivals = (event for body in bodies[1:-1] for event in body[1] if event[0] == "arrived")
        next(arrivals)[1]["prompt_ids"][0] = 1 << 63

    assert cli.main(["replay", str(rewrite(recorded, tmp_path / "run", huge, sign=True))]) == 1
    assert "no turn of a run" in capsys.readouterr().err


def test_a_header_comes_back() -> None:
    setup = h200()
    for estimator in (setup.estimator, None):
        engine = RecordedEngine("static_split", setup.limits, True, estimator)
        again = RecordedEngine.from_header(json.loads(json.dumps(engine.header(seed=1))))
        assert (again.policy, again.limits, again.caching) == (engine.policy, engine.limits, engine.caching)
        assert (again.estimator is None) == (estimator is None)
        if estimator is not None and again.estimator is not None:
            assert again.estimator.calibration == estimator.calibration
            assert again.estimator.shape == estimator.shape


def test_other_rules_see_the_shown_queue_as_they_would_keep_it() -> None:
    from tests.scheduler.test_plan_check import SNAPSHOT

    one, two = SNAPSHOT.waiting[0], SNAPSHOT.waiting[0]._replace(request_id=77, arrival_s=0.5)
    early = one._replace(arrival_s=0.0, lost_s=SNAPSHOT.now_s + 9)
    lost = two._replace(arrival_s=0.1, lost_s=SNAPSHOT.now_s - 1)
    urgent = two._replace(request_id=78, arrival_s=0.2, lost_s=SNAPSHOT.now_s + 1)
    recorded = SNAPSHOT._replace(waiting=(early, lost, urgent), waiting_total=3)
    plain, timely = QueueRules(), QueueRules("slack", "timely")
    assert as_kept_by(plain, plain, recorded) is recorded
    kept = as_kept_by(timely, plain, recorded)
    assert (kept.waiting, kept.late) == ((urgent, early), (lost,))
    assert (kept.waiting_total, kept.late_total) == (2, 1)
    assert as_kept_by(plain, timely, kept).waiting == (early, lost, urgent)


def test_decisions_that_an_older_record_has_in_one_turn_are_made_again(recorded: Path) -> None:
    """Records of before 2026-12: admitting and starting were two plans of one turn."""
    with Record(recorded) as found:
        engine, turns = RecordedEngine.from_header(found.header), list(found.turns())
    older: list[Turn] = []
    for turn in turns:
        if older and older[-1].plans and turn.now_s == older[-1].now_s and not turn.events:
            older[-1] = older[-1]._replace(plans=older[-1].plans + turn.plans)
        else:
            older.append(turn)
    again = Replay(engine)
    assert list(again.differences(older)) == []
    assert any(len(turn.plans) > 1 for turn in older)
    assert again.decisions >= sum(len(turn.plans) for turn in older) > 200
