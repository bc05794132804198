"""The console that tables go to, and how it is told where figures are. Knows nothing about what is printed."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

_WIDTH = 160
_ENDLESS = 100_000


def wide_console() -> Console:
    """As wide as the terminal; where the output goes elsewhere, wide enough for every table: no figure is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def unbroken_console() -> Console:
    """As wide as the terminal; where the output goes elsewhere, so wide that no path is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=_ENDLESS)


def tell_drawn(console: Console, pictures: Iterable[Path]) -> None:
    """Say which figures were written; each lies beside its SVG."""
    for path in pictures:
        console.print(f"drawn: {path} and {path.with_suffix('.svg').name}", markup=False, soft_wrap=True)
