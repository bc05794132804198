"""Case 11: whatever is wrong with a body is a 400 (415 for its kind), and never more than a line of our own words."""

from collections.abc import Iterator

import pytest

from tests.cases.scripted_server import serving
from tests.server.broken_bodies import DEEP, NO_REQUESTS
from tests.server.conftest import Served
from tests.server.test_requests import error_of

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BROKEN = [
    *NO_REQUESTS,
    b'{"messages": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    b'{"messages": "hello"}',
    b'{"messages": [null]}',
    b'{"tokens": [1, "2"]}',
    b'{"tokens": [1, true]}',
    b'{"tokens": [-1]}',
    b'{"tokens": [99999999999999999999]}',
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("model")) as server:
        server.say("fine")
        yield server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_case_11_no_broken_body_is_more_than_a_400(served: Served, path: str, content: bytes) -> None:
    error_of(served.http.post(path, content=content), 400)
    assert served.post().status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_case_11_kinds_and_methods(served: Served, path: str) -> None:
    body = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [5]}'
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"):
        error_of(served.http.post(path, content=body, headers={"content-type": kind}), 415)
    error_of(served.http.get(path), 405)
    error_of(served.http.put(path, content=body), 405)


def test_case_11_a_missing_kind_is_json_and_the_last_of_two_keys_counts(served: Served) -> None:
    content = b'{"prompt": "hello", "max_tokens": -1, "max_tokens": 1}'
    assert served.http.post("/v1/completions", content=content).json()["usage"]["completion_tokens"] == 1
