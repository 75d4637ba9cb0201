# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Sets gauges where and when this process may: provider, process policy, deferral.

This module exists twice, byte for byte; `_scalars.py` says why.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider

from . import _instruments as names
from . import _process
from ._series import Group, Series, Store, utf8

_MAX_ACTIONS: Final = 1024
_INT64: Final = range(-(2**63), 2**63)


class Emitter:
    """The series of one stream and their emission; called with the stream's lock held.

    While it is not known whether this process emits, the last value of each series waits, and so
    do actions given to `defer`; all are settled as soon as it is known.

    Attributes:
        quiet: Whether a number needs nothing but its store: there is nothing to emit to, nobody
            watches (`watched`), and no earlier value waits.
        index: The process index, once it is known.
        seen: The global provider that `follow_provider` found.
    """

    def __init__(
        self,
        owner: _process.Lasting,
        due: deque[Callable[[], object]],
        version: str,
        provider: MeterProvider | None,
        attributes: Mapping[str, Any],
        *,
        enabled: bool,
        all_processes: bool,
        watched: bool,
        paced: bool,
    ) -> None:
        self._owner = owner
        self._due = due
        self._version = version
        self._provider = provider
        self._attributes = dict(attributes)
        self._all_processes = all_processes
        self._allowed: bool | None = None if enabled else False
        self._watched = watched
        self._paced = paced
        self._values_wait = False
        self._closed = False
        self._instruments: names.Instruments | None = None
        self._groups: dict[tuple[str, str], Group] = {}
        self._series: dict[tuple[str, str, str], Series] = {}
        self._deferred: dict[Series, tuple[int | None, float | None, int]] = {}
        self._actions: deque[Callable[[bool], None]] = deque(maxlen=_MAX_ACTIONS)
        self.index: int | None = None
        self.seen: object = self  # no provider is this: the first value looks for one
        self.quiet = False

    # Series -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._series)

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def find(self, prefix: str, name: str, mode: str) -> Series | None:
        """The series, if anything was logged to it."""
        return self._series.get((prefix, name, mode))

    def add(self, prefix: str, name: str, mode: str, keep: Callable[[Series], Store]) -> Series:
        """Makes a series."""
        group = self._groups.get((prefix, mode))
        if group is None:
            group = self._groups[prefix, mode] = Group(prefix, mode)
        series = self._series[prefix, name, mode] = Series(group, name, keep)
        self._label(series)
        return series

    def _label(self, series: Series) -> None:
        group = series.group
        group.attributes = {**self._attributes, names.MODE: utf8(group.mode)}
        if group.prefix:
            group.attributes[names.PREFIX] = utf8(group.prefix)
        if self._all_processes and self.index is not None:
            group.attributes[names.PROCESS_INDEX] = self.index
        series.count_attributes = {**group.attributes, names.NAME: utf8(series.name)}
        known = series.name in names.WELL_KNOWN
        series.attributes = group.attributes if known else series.count_attributes

    # Provider -----------------------------------------------------------------------------------

    def follow_provider(self) -> None:
        """Turns to the global provider that is set now, unless the stream has its own."""
        provider = self._provider or metrics.get_meter_provider()
        self.seen = names.api._METER_PROVIDER
        before, self._instruments = self._instruments, None
        try:
            self._instruments = names.instruments_of(provider, self._version)
        finally:
            if self._instruments is not before:
                for series in self._series.values():
                    series.gauge = series.group.gauge = None
                _process.finish_before_the_rest()
            self._refresh()

    # Emission -----------------------------------------------------------------------------------

    def publish(self, series: Series, step: int | None, number: float) -> None:
        """Sets the gauges of a value and of its step, or lets them wait."""
        allowed = self._allowed
        if allowed is None:
            allowed = self.allowed()
        if self._closed or self._instruments is None:
            return
        if allowed and not self._paced:
            self._emit(self._instruments, series, step, number, int(not math.isfinite(number)))
        elif allowed is not False:
            self._wait(series, step, number)

    def _emit(
        self,
        instruments: names.Instruments,
        series: Series,
        step: int | None,
        number: float | None,
        nonfinite: int,
    ) -> None:
        group = series.group
        if nonfinite:
            instruments.nonfinite.add(nonfinite, series.count_attributes)
        if number is not None and math.isfinite(number):
            if series.gauge is None:
                series.gauge = instruments.gauge(series.gauge_name)
            series.gauge.set(number, series.attributes)
        if step is not None and step in _INT64:
            if group.gauge is None:
                group.gauge = instruments.gauge(names.STEP)
            group.gauge.set(step, group.attributes)

    def emit_waiting(self) -> None:
        """Sets the gauges that wait, where this process may."""
        if self._deferred and self.allowed() and self._instruments is not None:
            deferred, self._deferred = self._deferred, {}
            if not self._actions:
                _process.release(self._owner, self)
            for series, waiting in deferred.items():
                self._emit(self._instruments, series, *waiting)

    def _wait(self, series: Series, step: int | None, number: float) -> None:
        # Taken out and put in again: what was logged last goes out last, with its step.
        _, last, nonfinite = self._deferred.pop(series, (None, None, 0))
        if math.isfinite(number):
            self._deferred[series] = (step, number, nonfinite)
        else:
            self._deferred[series] = (step, last, nonfinite + 1)
        if len(self._deferred) == 1:
            _process.hold(self._owner, self)

    # Policy -------------------------------------------------------------------------------------

    def allowed(self) -> bool | None:
        """Whether this process emits; None while that is not known."""
        if self._allowed is None:
            index = _process.process_index()
            if index is not None:
                self._settle(index)
        return self._allowed

    def defer(self, action: Callable[[bool], None]) -> None:
        """Calls `action` with the answer of `allowed` as soon as there is one.

        The last 1,024 actions wait; what is pushed out is not called.
        """
        self._actions.append(action)
        self._refresh()
        _process.hold(self._owner, self)
        _process.finish_before_the_rest()

    def settle_last(self) -> None:
        """Emits what waits: nothing more will be known about this process."""
        self.emit_waiting()
        if self._allowed is None and (self._deferred or self._actions):
            index = _process.last_process_index()
            if index is None:
                self._drop()
            else:
                self._settle(index, final=True)

    def silence(self) -> None:
        """Ends all emission; series are still made."""
        self._allowed = False
        self._drop()

    def close(self) -> None:
        """Ends the emission of values; `allowed` goes on answering."""
        self._closed = True
        self._refresh()

    def _settle(self, index: int, *, final: bool = False) -> None:
        self.index = index
        allowed = self._all_processes or index == 0
        if not final:
            self._allowed = allowed
        if self._all_processes:
            for series in self._series.values():
                self._label(series)
        deferred, actions = self._deferred, self._actions.copy()
        self._drop()
        if allowed and self._instruments is not None:
            for series, waiting in deferred.items():
                self._emit(self._instruments, series, *waiting)
        self._due.extend(partial(action, allowed) for action in actions)

    def _drop(self) -> None:
        self._deferred = {}
        self._actions.clear()
        self._refresh()
        _process.release(self._owner, self)

    def set_waiting(self, waiting: bool) -> None:
        """Whether values wait in the stream's queues."""
        if waiting is not self._values_wait:
            self._values_wait = waiting
            self._refresh()

    def _refresh(self) -> None:
        no_gauges = self._closed or self._instruments is None
        silent = self._allowed is False or (no_gauges and not self._actions)
        self.quiet = silent and not self._values_wait and not self._watched
