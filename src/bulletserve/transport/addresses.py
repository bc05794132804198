"""Where the two processes meet: two sockets in a folder that only this user can open.

Knows nothing about what is sent. The front makes the folder and binds; the engine gets the addresses at its start.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Addresses:
    """ZeroMQ addresses, one per direction."""

    to_engine: str
    to_front: str


class MeetingPlace:
    """A private folder (mode 0700) with two socket files; removed on `close`."""

    def __init__(self) -> None:
        # not in $TMPDIR: the path of a Unix socket may have 107 bytes at most
        self._folder = Path(tempfile.mkdtemp(prefix="bullet-", dir="/tmp"))
        self.addresses = Addresses(f"ipc://{self._folder}/to-engine", f"ipc://{self._folder}/to-front")

    def close(self) -> None:
        """Remove the folder. May be called again."""
        shutil.rmtree(self._folder, ignore_errors=True)
