# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The time that a training loop waits for its data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import wrapt

from .accounting import Phase
from .context import Run

if TYPE_CHECKING:

    class _Proxy:
        __wrapped__: Any

        def __init__(self, wrapped: Any) -> None: ...
else:
    _Proxy = wrapt.ObjectProxy

# What is shorter is not worth remembering: that is a batch that was there already.
_SHORTEST: Final = 50_000


class TimedData(_Proxy):
    """A data set whose iteration is timed for one run; in everything else the data set itself."""

    def __init__(self, wrapped: Any, run: Run, role: str) -> None:
        super().__init__(wrapped)
        self._self_run = run
        self._self_role = role

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the data set."""
        return _Timed(iter(self.__wrapped__), self._self_run, self._self_role)


class _Timed:
    __slots__ = ("_iterator", "_role", "_run")

    def __init__(self, iterator: Iterator[Any], run: Run, role: str) -> None:
        self._iterator = iterator
        self._run = run
        self._role = role

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter_ns()
        try:
            return next(self._iterator)
        finally:
            ended = time.perf_counter_ns()
            if ended - began >= _SHORTEST:
                self._run.account.host(Phase.DATA, began, ended, self._role)
