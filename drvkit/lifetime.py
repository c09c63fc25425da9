"""Who owns a driver object, and until when.

The driver's handle and the duty to release it live in a `Box`. What users hold (`Owned`) refers to a box, and so does
everything that may still use the handle: a graph's node, an exec, a launch in flight. ``close()`` lets go of the
user's reference and refuses further use; the handle is released when the last reference is gone. What a release needs
holds the parents' boxes, so the order of destruction follows from the references and needs no thought.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

__all__ = ["Box", "ClosedError", "Live", "Owned", "live"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ClosedError(RuntimeError):
    """An object was used after it was closed."""


class Live(NamedTuple):
    """One driver object that exists now."""

    kind: str  # "buffer", "stream", "module", ...
    name: str
    made_at: str  # "file.py:12", the first line outside drvkit

    def __str__(self) -> str:
        return f"{self.kind} {self.name} (made at {self.made_at})"


_live: dict[int, Live] = {}
_serial = itertools.count(1)
_scopes = threading.local()  # .depth: the `ReleaseLater` blocks that this thread is in
_everywhere = 0  # those that hold back the releases of all threads
_parked: deque[Callable[[], Any]] = deque()  # in the order in which they came: children before their parents


def live() -> list[Live]:
    """The driver objects that exist now, oldest first: empty once everything is closed and nothing is in flight.

    Devices are not counted: their primary contexts last as long as the process.
    """
    return list(_live.values())


def caller() -> str:
    """``file:line`` of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__, weakref.__file__)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class ReleaseLater:
    """A block in which dropped objects are not released, but later.

    A release frees memory or waits for the device. Inside a capture that would end the capture, and on a thread of the
    driver that calls a host node it may deadlock; the garbage collector does not know that, so it must not decide it.
    """

    def __init__(self, *, everywhere: bool = False, then_release: bool = True) -> None:
        self.everywhere, self.then_release = everywhere, then_release

    def __enter__(self) -> None:
        global _everywhere
        _scopes.depth = getattr(_scopes, "depth", 0) + 1
        _everywhere += self.everywhere

    def __exit__(self, *_: object) -> None:
        global _everywhere
        _scopes.depth -= 1
        _everywhere -= self.everywhere
        if self.then_release:
            release_parked()


def release_parked() -> None:
    """Release what waits for it, if this thread may."""
    while _parked and not _everywhere and not getattr(_scopes, "depth", 0):
        try:
            release = _parked.popleft()
        except IndexError:  # another thread was faster
            return
        try:
            release()
        except Exception as error:  # as from the garbage collector: it concerns nobody here
            sys.excepthook(type(error), error, error.__traceback__)


def _release(serial: int, release: Callable[[], Any]) -> None:
    if _everywhere or getattr(_scopes, "depth", 0):
        _parked.append(partial(_release, serial, release))
        return
    release()
    _live.pop(serial, None)  # one that could not be released is still there


class Box:
    """A driver handle; ``release`` gives it back when the last reference to the box is gone, or at exit.

    ``raw`` is the handle as a number. ``owner`` is what must outlive the handle.
    """

    __slots__ = ("__weakref__", "_finalizer", "_serial", "handle", "owner", "raw")

    def __init__(self, handle: Any, release: Callable[[], Any] | None, info: Live, owner: object = None) -> None:
        self.handle, self.owner = handle, owner
        self.raw = 0 if handle is None else int(handle)
        self._finalizer = None
        if release is not None:  # else it is somebody else's
            self._serial = next(_serial)
            _live[self._serial] = info
            self._finalizer = weakref.finalize(self, _release, self._serial, release)
            release_parked()

    def disown(self) -> None:
        """Somebody else releases the handle from now on."""
        if self._finalizer is not None and self._finalizer.detach():
            _live.pop(self._serial, None)


class Owned:
    """Base of what users hold and close."""

    kind = "object"
    box: Box | None = None
    info: Live

    def _own(self, handle: Any, release: Callable[[], Any] | None, name: str = "", owner: object = None) -> None:
        """Take ``handle`` over. ``release`` must not refer to ``self``; None borrows the handle."""
        self.info = Live(self.kind, name or f"{int(handle):#x}", caller())
        self.box = Box(handle, release, self.info, owner)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def closed(self) -> bool:
        return self.box is None

    @property
    def handle(self) -> Any:
        """The raw driver value."""
        return self._in_use().handle

    def _in_use(self) -> Box:
        """Its box, to hold while the driver works with the handle: another thread may close this meanwhile."""
        box = self.box
        self._check_open()
        assert box is not None
        return box

    def _check_open(self) -> None:
        if self.box is None:
            raise ClosedError(f"{self.info} is closed")

    def close(self) -> None:
        """Refuse further use, and release it: now, or as soon as nothing uses it any more. Closing twice is fine."""
        self.box = None

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' closed' if self.closed else ''}>"
