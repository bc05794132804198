"""Which rows of a step's logits have masks.

Knows nothing about devices or grammars.
"""

from typing import NamedTuple

from bulletserve.core.launch import Launch


class MaskedRow(NamedTuple):
    """A row of the step's logits, the seat whose token it chooses, and what that may be (as in `events.Masked`)."""

    row: int
    seat: int
    mask: bytes


def masked_rows(launch: Launch) -> list[MaskedRow]:
    """Those of a launch, in the order of the rows. The rows of logits: parts that sample, then decode rows."""
    if not launch.masks:
        return []
    masks = dict(launch.masks)
    seats = (*(part.seat for part in launch.parts if part.samples), *launch.rows)
    return [MaskedRow(row, seat, masks[seat]) for row, seat in enumerate(seats) if seat in masks]
