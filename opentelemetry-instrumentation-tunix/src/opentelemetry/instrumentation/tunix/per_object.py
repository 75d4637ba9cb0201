# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What is known about objects of the library, kept no longer than they live."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class PerObject(Generic[_T]):
    """A value for each object, by identity: it may be unhashable, or equal to another one.

    Args:
        gone: Called with the value of an object that no longer exists, on whatever thread and at
            whatever moment that shows: it must take no lock.
    """

    def __init__(self, gone: Callable[[_T], None] = lambda _: None) -> None:
        self._gone = gone
        self._values: dict[int, _T] = {}
        self._immortal: list[Any] = []
        # Reentrant: a signal handler or a finalizer may come in at any moment.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, subject: Any) -> _T | None:
        """The value, if there is one."""
        return self._values.get(id(subject))

    def set(self, subject: Any, make: Callable[[_T | None], _T]) -> _T:
        """Gives an object the value that `make` makes of the one it has, and returns it."""
        with self._lock:
            key = id(subject)
            before = self._values.get(key)
            value = make(before)
            if before is None and key not in self._values:
                # An object that takes no weak reference is kept, and its identity with it.
                try:
                    weakref.finalize(subject, self._forget, key).atexit = False
                except TypeError:
                    self._immortal.append(subject)
            self._values[key] = value
            return value

    def values(self) -> list[_T]:
        """All values now."""
        with self._lock:
            return list(self._values.values())

    def _forget(self, key: int) -> None:
        self._gone(self._values.pop(key))
