"""One process at a time writes to a folder: a lock that goes away with its process, however it ends.

Knows nothing about what is in the folders.
"""

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bulletserve.core.errors import ConfigError

LOCK = ".lock"


@contextmanager
def held(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the lock of each folder; folders that are missing are made. Raises `ConfigError` where another has it."""
    with ExitStack() as locks:
        for folder in sorted({one.resolve() for one in folders}):
            folder.mkdir(parents=True, exist_ok=True)
            file = locks.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{folder} is in use by another process: wait for it to end, or name another folder"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"{folder} cannot be locked ({error.strerror}): name a folder on another disk"
                ) from None
        yield
