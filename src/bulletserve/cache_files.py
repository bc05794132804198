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


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
