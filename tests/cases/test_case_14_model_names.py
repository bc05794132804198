"""Case 14: every served name works and comes back; any other is a 404 that lists them."""

from collections.abc import Iterator

import pytest

from tests.cases.scripted_server import serving
from tests.server.conftest import Served
from tests.server.sse import events
from tests.server.test_requests import error_of

NAMES = ("org/small", "small-alias")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("model"), served_names=NAMES) as server:
        server.say("fine")
        yield server


@pytest.mark.parametrize("name", ["other", "", "org/small/", "small", "/models/org/small", "ORG/SMALL", "a" * 100_000])
def test_case_14_names_that_are_not_served(served: Served, name: str) -> None:
    for answer in (
        served.post(model=name),
        served.chat(model=name),
        served.http.post("/tokenize", json={"model": name, "prompt": "x"}),
        served.http.post("/detokenize", json={"model": name, "tokens": [5]}),
    ):
        error = error_of(answer, 404)
        assert error["param"] == "model" and error["code"] == "model_not_found"
        assert all(served_name in error["message"] for served_name in NAMES)


@pytest.mark.parametrize("name", [*NAMES, None])
def test_case_14_names_that_are_served_come_back(served: Served, name: str | None) -> None:
    expected = name or NAMES[0]
    for ask in (served.post, served.chat):
        assert ask(model=name, max_tokens=2).json()["model"] == expected
        assert {event["model"] for event in events(ask(model=name, max_tokens=2, stream=True))} == {expected}
    assert served.http.get(f"/v1/models/{expected}").json()["id"] == expected
    assert [card["id"] for card in served.http.get("/v1/models").json()["data"]] == list(NAMES)
    error_of(served.http.get("/v1/models/other"), 404)
