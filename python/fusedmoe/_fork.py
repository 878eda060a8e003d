"""A lock that a forked child finds open, whoever held it in the parent."""

from __future__ import annotations

import os
import threading
from types import TracebackType

_generation = 0


def _in_child() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_in_child)


class ForkLock:
    """As ``threading.RLock``, for ``with``. What it guards must be sound at every point, since the
    child may find it in the middle of a change."""

    __slots__ = ("_lock", "_of")

    def __init__(self) -> None:
        self._lock, self._of = threading.RLock(), _generation

    def __enter__(self) -> None:
        if self._of != _generation:
            self._lock, self._of = threading.RLock(), _generation
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._lock.release()
