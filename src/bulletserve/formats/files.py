"""The two ways a checkpoint's files are read: memory maps for weights, whole documents for JSON and text.

Knows nothing about what is in them. Both turn the operating system's errors into ours, so that the readers
above deal with `ModelMissing` (not there, not readable) and `BrokenCheckpoint` (there, but no such
document) only.
"""

import json
import mmap
import stat
from pathlib import Path
from typing import Literal

from bulletserve.core.errors import BrokenCheckpoint, ModelMissing


def kind_of(path: Path) -> Literal["file", "folder", "absent"]:
    """What is there, with nothing to raise: a name that the system refuses to look up names nothing."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return "absent"
    return "folder" if stat.S_ISDIR(mode) else "file"


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, read only and paged in on first touch. Arrays over it keep it alive.

    Raises `ModelMissing` if it cannot be opened, `BrokenCheckpoint` if it is empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError:  # mmap's own word for a file of zero bytes
        raise BrokenCheckpoint(f"{path}: the file is empty") from None


def read_text(path: Path) -> str:
    """The whole file as UTF-8. Raises `ModelMissing` or `BrokenCheckpoint`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise BrokenCheckpoint(f"{path}: not UTF-8 at byte {error.start}") from None


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in the file. Raises `ModelMissing` or `BrokenCheckpoint`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> dict[str, object]:
    """The JSON object in `text`; `where` names its origin in the `BrokenCheckpoint` of anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _unreadable(path: Path, error: OSError) -> ModelMissing:
    return ModelMissing(f"{path}: cannot be read ({error.strerror})")
