"""Targets per request: the server's classes, the body's numbers, and what reaches the engine."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError, InvalidRequest
from bulletserve.core.slo import Slo
from bulletserve.server.settings import ServerSettings
from bulletserve.server.slo_fields import SloBody, request_slo, slo_classes
from bulletserve.telemetry import end_rate
from tests.server.conftest import SETTINGS, Served
from tests.server.test_requests import error_of

DEFAULT = Slo("default", 0.3, 0.02)
CLASSES = slo_classes(DEFAULT, ["chat:ttft_ms=500,ttft_ms_per_prompt_token=0.1,tpot_ms=25", "offline:"])


def body(**fields: object) -> SloBody:
    return SloBody.model_validate(fields)


def test_a_server_has_its_default_its_classes_and_best_effort() -> None:
    assert {
        "default": DEFAULT,
        "best_effort": Slo("best_effort"),
        "chat": Slo("chat", 0.5, 0.025, 0.0001),
        "offline": Slo("offline"),
    } == CLASSES


@pytest.mark.parametrize(
    "spec",
    [":ttft_ms=3", "chat:ttft=3", "chat:ttft_ms=x", "chat:ttft_ms=-1", "default:tpot_ms=1", "chat:tpot_ms", "chat"],
)
def test_a_class_that_cannot_be_is_told_at_start(spec: str) -> None:
    with pytest.raises(ConfigError, match="--slo-class"):
        ServerSettings(("small",), slo_classes=(spec,))


def test_numbers_replace_those_of_the_class() -> None:
    assert request_slo(None, CLASSES) is DEFAULT
    assert request_slo(body(), CLASSES) == DEFAULT
    assert request_slo(body(ttft_ms=900), CLASSES) == Slo("default", 0.9, 0.02)
    assert request_slo(body(**{"class": "chat", "tpot_ms": 8}), CLASSES) == Slo("chat", 0.5, 0.008, 0.0001)
    assert request_slo(body(**{"class": "best_effort"}), CLASSES) == Slo("best_effort")
    assert request_slo(body(**{"class": "best_effort", "ttft_ms": 50.0}), CLASSES) == Slo("best_effort", 0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {"class": "gold"},
        {"ttft_ms": 0},
        {"tpot_ms": -1.0},
        {"ttft_ms": 1e9},
        {"ttft_ms": float("nan")},
        {"ttft_ms_per_prompt_token": -0.1},
        {"class": "best_effort", "ttft_ms_per_prompt_token": 1},
    ],
)
def test_targets_that_cannot_be(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_slo(body(**fields), CLASSES)
    assert caught.value.param == "slo"


@given(tpot_ms=st.floats(1e-3, 3.6e6))
@settings(deadline=None)
def test_targets_that_are_nearly_equal_are_one_class_and_never_laxer_than_asked(tpot_ms: float) -> None:
    tpot_s = request_slo(body(tpot_ms=tpot_ms), CLASSES).tpot_s
    assert tpot_s is not None
    assert 0.9 * tpot_ms < tpot_s * 1e3 <= tpot_ms * (1 + 1e-9)
    mantissa = f"{tpot_s:.6e}".partition("e")[0]
    assert mantissa[3:] == "00000"


def test_targets_reach_the_engine(served: Served) -> None:
    served.say("hello")
    served.post(slo={"ttft_ms": 250, "tpot_ms": 8.04})
    served.chat(slo={"class": "best_effort"})
    served.post(slo=None)
    asked, best_effort, plain = served.engine.arrived
    assert asked.slo.ttft_s == pytest.approx(0.25)
    assert asked.slo.tpot_s == pytest.approx(0.008)
    assert (best_effort.slo, plain.slo) == (Slo("best_effort"), Slo())


def test_a_full_queue_says_when_it_will_have_been_served(served: Served) -> None:
    """By the engine's forecast."""
    served.engine.held, served.engine.queue_s = True, 41.2
    with ThreadPoolExecutor(SETTINGS.max_waiting) as threads:
        waiting = [threads.submit(served.post) for _ in range(SETTINGS.max_waiting)]
        status = served.server.open_requests.metrics
        served.wait_until(lambda: len(served.engine.running) == SETTINGS.max_waiting)
        served.wait_until(lambda: status.status is not None and status.status.queue_s == 41.2)
        refused = served.post()
        served.engine.held = False
        assert all(answer.result().status_code == 200 for answer in waiting)
    assert error_of(refused, 429)["code"] == "overloaded"
    assert refused.headers["retry-after"] == "42"


def test_under_load_it_goes_by_the_rate_at_which_requests_end(fresh: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight wait, one is served in 0.3 s: 2.4 s, whatever a forecast of prompts says."""
    monkeypatch.setattr(end_rate, "LEAST_ENDS", 4)
    fresh.say("hello hello hello hello")
    fresh.engine.seats, fresh.engine.pause_s, fresh.engine.queue_s = 1, 0.1, 0.1
    over, said = Event(), []

    def ask_again_and_again() -> None:
        while not over.is_set():
            answer = fresh.post(max_tokens=3)
            if answer.status_code == 429:
                said.append(int(answer.headers["retry-after"]))
                over.wait(0.05)

    with ThreadPoolExecutor(SETTINGS.max_waiting + 2) as threads:
        for _ in range(SETTINGS.max_waiting + 2):
            threads.submit(ask_again_and_again)
        fresh.wait_until(lambda: fresh.server.open_requests.metrics.finished["length"] >= 8)
        fresh.wait_until(lambda: bool(said))
        over.set()
    assert 2 <= said[-1] <= 4


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        ({"class": "gold"}, "there are default, best_effort"),
        ({"ttft": 5}, "slo.ttft"),
        ({"tpot_ms": "5"}, "slo.tpot_ms"),
        (7, "slo"),
    ],
)
def test_a_wrong_slo_is_told_by_name(served: Served, slo: object, words: str) -> None:
    error = error_of(served.post(slo=slo), 400)
    assert error["param"] == "slo"
    assert words in error["message"]


def test_the_smallest_number_is_a_target_that_nothing_meets() -> None:
    assert 0 < request_slo(body(tpot_ms=5e-324), CLASSES).tpot_s <= 1e-9
