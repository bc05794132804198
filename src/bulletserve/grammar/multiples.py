"""Whether the `multipleOf` of a JSON schema can be followed.

Knows nothing about grammars. Who follows a number digit by digit has to keep its remainder, and where several may hold
at once all of their remainders: a few digits more in the schema are a hundred times the work.
"""

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any

MOST = 10_000
"""Remainders to tell apart, in all; so many take a hundredth of a second, ten times as many half of one."""

_WRITTEN = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]{1,400})')


def too_many_multiples(schema: Any) -> str:
    """What is wrong with the `multipleOf` in a schema, at any depth; "" for nothing."""
    return _judged(_in_schema(schema))


def too_many_written(text: str) -> str:
    """The same of a grammar in which schemas are written out."""
    return _judged(_in_text(text))


def _judged(numbers: Iterator[Decimal]) -> str:
    remainders = 1
    for number in numbers:
        remainders = lcm(remainders, _digits(number))
        if remainders > MOST:
            return (
                f"multipleOf {number}: the numbers of a schema may have {MOST} as their least common multiple, without "
                "the zeros at their ends and the decimal point"
            )
    return ""


def _digits(number: Decimal) -> int:
    """Zeros at the end cost nothing, nor does the place of the decimal point."""
    digits = "".join(map(str, number.as_tuple().digits)).strip("0")
    return int(digits[: len(str(MOST)) + 1] or 1)


def _in_schema(schema: Any) -> Iterator[Decimal]:
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            number = value.get("multipleOf")
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield Decimal(repr(number))


def _in_text(text: str) -> Iterator[Decimal]:
    for found in _WRITTEN.finditer(text):
        try:
            yield Decimal(found[1])
        except InvalidOperation:
            continue
