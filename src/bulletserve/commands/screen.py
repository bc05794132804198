"""The console that tables go to. Knows nothing about what is printed."""

from rich.console import Console

_WIDTH = 160


def wide_console() -> Console:
    """As wide as the terminal; where the output goes elsewhere, wide enough for every table: no figure is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
