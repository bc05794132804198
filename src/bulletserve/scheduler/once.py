"""A property that is computed when it is first read.

Knows nothing about what is computed. It is `functools.cached_property` as Python has it from 3.12 on, without the lock
that costs 3.11 more than most of what a decision computes.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class once(Generic[_T]):  # noqa: N801  (used as a decorator, like `property`)
    """Of an object with a `__dict__`, which then answers by itself; one thread."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> _T:
        made = instance.__dict__[self._name] = self._make(instance)
        return made
