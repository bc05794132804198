"""Processor time that others took, of what the system counts and what this process had."""

from math import isnan
from pathlib import Path
from types import SimpleNamespace

import pytest

from bulletserve.comparison import other_programs
from bulletserve.comparison.other_programs import OtherPrograms


class System:
    """`cores` cores, their time in seconds by who had it."""

    def __init__(self, stat: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.stat, self.cores = stat, cores
        self.wall_s = self.own_s = self.others_s = self.stolen_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.wall_s, process_time=lambda: self.own_s)
        monkeypatch.setattr(other_programs, "time", clock)
        monkeypatch.setattr(other_programs, "STAT", stat)
        monkeypatch.setattr(other_programs.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(other_programs.os, "sysconf", lambda name: 100)
        self.on(0.0)

    def on(self, wall_s: float, own_s: float = 0.0, others_s: float = 0.0, stolen_s: float = 0.0) -> None:
        self.wall_s += wall_s
        self.own_s += own_s
        self.others_s += others_s
        self.stolen_s += stolen_s
        busy_s = self.own_s + self.others_s
        idle_s = self.cores * self.wall_s - busy_s - self.stolen_s
        # user nice system idle iowait irq softirq steal guest guest_nice; what guests have is user time too
        counts = [busy_s, 0, 0, idle_s / 2, idle_s / 2, 0, 0, self.stolen_s, busy_s, 0]
        text = " ".join(str(1000 + round(100 * count)) for count in counts)
        self.stat.write_text(f"cpu  {text}\ncpu0 1 2 3\n")


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    return tmp_path / "stat"


@pytest.mark.parametrize(
    ("cores", "used", "own_s", "others_s", "stolen_s", "taken"),
    [
        (2, 2, 19.0, 0.2, 0.0, 0.01),
        (2, 2, 10.0, 8.0, 0.0, 0.4),
        (2, 2, 10.0, 0.0, 8.0, 0.4),  # by the host of a virtual machine
        (64, 16, 100.0, 470.0, 0.0, 0.0),  # on the 48 cores that were free
        (64, 16, 100.0, 530.0, 0.0, 50 / 160),
        (1, 2, 1.0, 9.0, 0.0, 0.45),
        (2, 2, 10.0, -0.5, 0.0, 0.0),  # the counts are rounded
    ],
)
def test_what_others_had(
    cores: int,
    used: int,
    own_s: float,
    others_s: float,
    stolen_s: float,
    taken: float,
    stat: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = System(stat, monkeypatch, cores)
    system.on(50.0, 3.0, 40.0)  # before
    with OtherPrograms(used) as others:
        system.on(10.0, own_s, others_s, stolen_s)
    assert others.taken_x == pytest.approx(taken, abs=1e-6)


@pytest.mark.parametrize("text", ["", "cpu  0 0 0 0 0 0 0 0 0 0\n", "cpu  1 2 x\n", None])
def test_a_system_that_does_not_say(text: str | None, stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(stat, monkeypatch, 2)
    with OtherPrograms(2) as others:
        system.on(10.0, 1.0, 9.0)
        stat.unlink() if text is None else stat.write_text(text)
    assert isnan(others.taken_x)


def test_of_a_moment_nothing_is_said(stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(stat, monkeypatch, 2)
    with OtherPrograms(2) as others:
        system.on(0.5, 0.1, 0.9)
    assert isnan(others.taken_x)
