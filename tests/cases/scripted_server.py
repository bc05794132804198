"""A server over an engine that answers what a test tells it to, for the cases that are about the front."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.server.conftest import SETTINGS, Served
from tests.server.small_model import TEMPLATE, small_checkpoint


@contextmanager
def serving(
    folder: Path, *, template: str | None = TEMPLATE, plain_messages: bool = False, **settings: object
) -> Iterator[Served]:
    """A server whose model has a context of 256 tokens."""
    checkpoint = small_checkpoint(folder, template=template)
    served = Served(checkpoint, replace(SETTINGS, **settings), plain_messages=plain_messages)  # type: ignore[arg-type]
    try:
        yield served
    finally:
        served.close()
