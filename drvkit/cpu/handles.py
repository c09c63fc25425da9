"""The numbers by which callers name the driver's objects, and the refusals of the driver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeVar

__all__ = ["Handles", "RefusedError", "handles"]

_T = TypeVar("_T")


class RefusedError(Exception):
    """A call is refused; ``code`` is the driver's name of the result, without ``CUDA_ERROR_``, and ``why`` says more
    than that, for a report."""

    def __init__(self, code: str, why: str = "") -> None:
        self.code, self.why = code, why
        super().__init__(code)


class Handles:
    """Objects by their handles. A handle is never used again, so a stale one is known as such."""

    def __init__(self) -> None:
        self._known: dict[int, object] = {}
        self._numbers = itertools.count(0x7C0000000010, 0x10)

    def add(self, thing: object) -> int:
        number = next(self._numbers)
        self._known[number] = thing
        return number

    def find(self, handle: int, kind: type[_T], code: str = "INVALID_VALUE") -> _T:
        """The object; `RefusedError` with ``code`` if there is none of that kind."""
        thing = self._known.get(handle)
        if not isinstance(thing, kind):
            raise RefusedError(code)
        return thing

    def all(self, kind: type[_T]) -> Iterator[_T]:
        return (thing for thing in self._known.values() if isinstance(thing, kind))

    def drop(self, handle: int) -> None:
        del self._known[handle]

    def forget_all(self) -> None:
        self._known.clear()


handles = Handles()
