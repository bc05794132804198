"""Power and clock through a made-up NVML."""

import sys
import threading
from math import isnan
from types import SimpleNamespace

import pytest

from bulletserve.profiling import meter
from bulletserve.profiling.meter import Meter, Watch


class Nvml(SimpleNamespace):
    """Draws 300 W, as its counter says every `period_s`; the clock falls by 10 MHz with each look."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.clock, self.asked, self.period_s = 100.0, 1510, "", 0.1

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self.asked = f"index {index}"
        return "card"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.asked = uuid
        return "card"

    def nvmlDeviceGetTotalEnergyConsumption(self, card: str) -> int:  # noqa: N802
        return int(300_000 * self.period_s * int(self.now_s / self.period_s + 1e-9))

    def nvmlDeviceGetClockInfo(self, card: str, kind: int) -> int:  # noqa: N802
        self.clock -= 10
        return self.clock

    def nvmlDeviceGetEnforcedPowerLimit(self, card: str) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, card: str, kind: int) -> int:  # noqa: N802
        raise RuntimeError("not supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(meter.time, "monotonic", lambda: made.now_s)
    return made


def test_watts_are_energy_over_time_and_the_clock_a_mean(nvml: Nvml) -> None:
    one = Meter()
    one.begin()
    for _ in range(3):
        nvml.now_s += 0.5
        one.sample()
    assert one.end() == (pytest.approx(300.0), 1490.0)
    assert nvml.asked == "index 0" and one.why_not == ""


@pytest.mark.parametrize("period_s", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("window_s", [0.4, 0.6])
@pytest.mark.parametrize("began_s", [0.0, 0.037, 0.099])
def test_the_counters_period_is_no_error(nvml: Nvml, period_s: float, window_s: float, began_s: float) -> None:
    """A plain difference over a window is off by up to a period in it: a quarter of 0.4 s."""
    nvml.period_s, nvml.now_s = period_s, 100.0 + began_s
    one = Meter()
    one.begin()
    for _ in range(round(window_s / 0.005)):
        nvml.now_s += 0.005
        one.sample()
    assert one.end()[0] == pytest.approx(300.0, rel=0.03)


def test_a_window_in_which_the_counter_stood_still_has_no_figure(nvml: Nvml) -> None:
    one = Meter()
    one.begin()
    for _ in range(10):
        nvml.now_s += 0.015
        one.sample()
    assert all(map(isnan, one.end()))


def test_what_came_after_the_window_does_not_count(nvml: Nvml) -> None:
    one = Meter()
    one.begin()
    for _ in range(5):
        nvml.now_s += 0.5
        one.sample()
    assert one.end(101.6) == (pytest.approx(300.0), 1490.0), "the mean of three clocks"
    assert one.end()[1] == 1480.0


def test_facts_of_the_card(nvml: Nvml) -> None:
    one = Meter(uuid="GPU-12-34")
    assert nvml.asked == "GPU-12-34"
    assert one.power_limit_w() == 700.0
    assert one.max_clock_mhz() is None, "this card does not say"


def test_without_nvml_there_are_no_figures_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    one = Meter()
    one.begin()
    one.sample()
    assert all(map(isnan, one.end())) and one.why_not
    assert one.power_limit_w() is None and one.max_clock_mhz() is None


def test_a_watch_looks_by_itself_also_when_what_it_watches_fails(nvml: Nvml) -> None:
    one = Meter()
    looks: list[float] = []

    def sample() -> None:
        nvml.now_s += 0.1
        looks.append(nvml.now_s)
        Meter.sample(one)
        if len(looks) == 5:
            enough.set()

    enough = threading.Event()
    one.sample = sample  # type: ignore[method-assign]
    watch = Watch(one)
    with pytest.raises(KeyError), watch:
        assert enough.wait(10)
        raise KeyError
    assert watch.watts == pytest.approx(300.0)
    assert not watch._thread.is_alive()


def test_a_watch_without_a_meter_has_no_figures() -> None:
    with Watch(None) as watch:
        pass
    assert isnan(watch.watts) and isnan(watch.mhz)
