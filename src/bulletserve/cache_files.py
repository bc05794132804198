"""Files that we keep for later starts: where they lie, and how they are written.

Knows nothing about what is in them; the standard library only, so that any folder may use it.
"""

import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """$XDG_CACHE_HOME/bulletserve, or ~/.cache/bulletserve."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bulletserve"


def try_out(path: Path) -> None:
    """Raise the `OSError` that keeps `write_whole` from writing `path`; folders that are missing are made."""
    handle, draft = _new_draft(path)
    os.close(handle)
    Path(draft).unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    handle, draft = _new_draft(path)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _new_draft(path: Path) -> tuple[int, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
