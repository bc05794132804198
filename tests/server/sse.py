"""Reads server-sent events strictly: one line of JSON per event, and [DONE] last."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.content.split(b"\n\n")
    assert end == b""
    assert blocks.pop() == b"data: [DONE]"
    assert all(block.startswith(b"data: ") and block.isascii() and b"\n" not in block for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def texts(chunks: list[dict[str, Any]], choice: int = 0) -> list[str]:
    """The text of each event of a choice, of either endpoint."""
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return [c["text"] if "text" in c else c["delta"]["content"] for c in found]


def ends(chunks: list[dict[str, Any]]) -> list[tuple[int, str, object]]:
    """Every end of a choice that was told."""
    found = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    return [(c["index"], c["finish_reason"], c["stop_reason"]) for c in found]
