"""`bullet serve` with the flags that change the front, as a user runs it."""

import json
import signal
from pathlib import Path

import httpx

from tests.end_to_end.test_processes import CONFIG, Served
from tests.server.small_model import small_tokenizer

KEY = "sk-nobody-may-read-this"


def test_keys_from_a_file_a_log_of_objects_and_anothers_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\nsk-second\n")
    served = Served(
        tmp_path,
        *("--api-key-file", str(tmp_path / "keys"), "--log-format", "json", "--enable-log-requests"),
        *("--root-path", "/llm", "--shutdown-timeout", "5", "--allowed-origins", "https://a.example"),
        *("--tokenizer", str(_tokenizer_folder(tmp_path / "other"))),
    )
    try:
        assert served.http.get("/v1/models").status_code == 401
        for key in (KEY, "sk-second"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"for-{key[-4:]}"}
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            answer = served.http.post("/llm/v1/completions", json=body, headers=headers)
            assert answer.json()["usage"]["prompt_tokens"] == 1  # the other's tokenizer has a token for it
        text = served.http.post("/tokenize", json={"prompt": "hello"}, headers={"authorization": f"Bearer {KEY}"})
        assert text.json()["count"] == 1
        assert _allowed_origin(served.url) == "https://a.example"
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
        log = served.process.communicate()[1]
    finally:
        served.close()
    assert KEY not in log and "sk-second" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    answered = [line for line in lines if line.get("completion_tokens") == 3]
    assert [line["request_id"] for line in answered] == ["for-this", "for-cond"]
    assert all(line["path"] == "/v1/completions" and line["status"] == 200 for line in answered)
    assert [line["status"] for line in lines if line.get("path") == "/v1/models"] == [401]


def _tokenizer_folder(folder: Path) -> Path:
    """A checkpoint of which only the tokenizer matters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _allowed_origin(url: str) -> str:
    answer = httpx.options(
        f"{url}/v1/completions",
        headers={"origin": "https://a.example", "access-control-request-method": "POST"},
    )
    return answer.headers["access-control-allow-origin"]
