"""Where a command is going to write: tried out before its work, because a result that cannot be kept is work lost.

Knows nothing about what is written. Trying out is doing: permissions do not tell of folders that take no new files
(/proc), of names that are too long, of disks that are read-only.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from bulletserve.cache_files import try_out
from bulletserve.core.errors import ConfigError


def check_outputs(
    files: Mapping[str, Path | None], report: Path | None = None, *, new: Collection[str] = (), make: bool = False
) -> None:
    """Raise `ConfigError` for a file (by its flag) or a folder for figures (`--report`) that cannot be written.

    Files of the flags in `new` must not hold anything yet. `make`: folders of files are made where there are none; that
    for figures is made when they are drawn.
    """
    named: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        with _told(flag, path):
            _check_file(flag, path, new=flag in new, make=make)
            other = named.setdefault(path.resolve(), flag)
        if other != flag:
            raise ConfigError(f"{other} and {flag} name the same file")
    if report is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--report needs matplotlib: pip install matplotlib")
    with _told("--report", report):
        if report.exists() and not report.is_dir():
            raise ConfigError(f"--report {report}: that is a file, name a folder")
        _try_folder(report)


def _check_file(flag: str, path: Path, *, new: bool, make: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: that is a folder, name a file in a folder that can be written to")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} {path}: that is no plain file and would be replaced by one: name another")
    if new and path.exists() and path.stat().st_size:
        raise ConfigError(f"{flag} {path} is there already: name a new file")
    if not make and not path.parent.is_dir():
        raise ConfigError(
            f"{flag} {path}: there is no folder {path.parent}: name a file in a folder that can be written to"
        )
    try_out(path)


def _try_folder(path: Path) -> None:
    """Make it, write into it, and leave no trace: another option may still be wrong."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    try:
        try_out(path / "x")
    finally:
        for one in missing:
            with suppress(OSError):
                one.rmdir()


@contextmanager
def _told(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}: it must lie where it can be written to") from None
