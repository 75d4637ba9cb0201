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
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider

from . import _instruments as names
from . import _process

if TYPE_CHECKING:
    from ._gauges import Store

_MAX_ACTIONS: Final = 1024
_INT64: Final = range(-(2**63), 2**63)


class Group:
    """A (prefix, mode): its values share a step gauge and are emitted in log order."""

    __slots__ = ("attributes", "gauge", "mode", "prefix", "queue")

    def __init__(self, prefix: str, mode: str) -> None:
        self.prefix = prefix
        self.mode = mode
        self.attributes: dict[str, Any] = {}
        self.gauge: metrics._Gauge | None = None
        self.queue: deque[Any] = deque()


class Series:
    """A (prefix, name, mode).

    Attributes:
        prefix: The metrics prefix, "" for none.
        name: The key as it was logged.
        mode: "train", "eval" or what else was logged.
        gauge_name: The instrument's name.
        store: What the stream's `keep` returned for this series, if there is one.
        unresolved: How many logged values are not in the store yet.
    """

    __slots__ = (
        *("attributes", "count_attributes", "gauge", "gauge_name", "group", "mode", "name"),
        *("prefix", "store", "unresolved"),
    )

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.prefix = group.prefix
        self.name = name
        self.mode = group.mode
        self.gauge_name = names.gauge_name(name)
        self.attributes: dict[str, Any] = {}
        self.count_attributes: dict[str, Any] = {}
        self.gauge: metrics._Gauge | None = None
        self.store: Store | None = None
        self.unresolved = 0


class Emitter:
    """The series of one stream and their emission; called with the stream's lock held.

    While it is not known whether this process emits, the last value of each series waits, and so
    do actions given to `defer`; all are settled as soon as it is known.

    Attributes:
        quiet: Whether `publish` would do nothing, whatever it is given.
        index: The process index, once it is known.
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
    ) -> None:
        self._owner = owner
        self._due = due
        self._version = version
        self._provider = provider
        self._attributes = dict(attributes)
        self._all_processes = all_processes
        self._allowed: bool | None = None if enabled else False
        self._closed = False
        self._seen: object = self  # no provider is this: the first call looks for one
        self._instruments: names.Instruments | None = None
        self._groups: dict[tuple[str, str], Group] = {}
        self._series: dict[tuple[str, str, str], Series] = {}
        self._deferred: dict[Series, tuple[int | None, float | None, int]] = {}
        self._actions: deque[Callable[[bool], None]] = deque(maxlen=_MAX_ACTIONS)
        self.index: int | None = None
        self.quiet = not enabled

    # Series -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._series)

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series.values())

    def find(self, prefix: str, name: str, mode: str) -> Series | None:
        """The series, if anything was logged to it."""
        return self._series.get((prefix, name, mode))

    def add(self, prefix: str, name: str, mode: str) -> Series:
        """Makes a series."""
        group = self._groups.get((prefix, mode))
        if group is None:
            group = self._groups[prefix, mode] = Group(prefix, mode)
        series = self._series[prefix, name, mode] = Series(group, name)
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
        """Notices that the global provider has been set; cheap when nothing has changed."""
        if names.peek_provider() is self._seen:
            return
        provider = self._provider or metrics.get_meter_provider()
        self._seen = names.peek_provider()
        instruments = names.instruments_of(provider, self._version)
        if instruments is not self._instruments:
            self._instruments = instruments
            for series in self._series.values():
                series.gauge = series.group.gauge = None
            _process.finish_before_the_rest()
        self._refresh()

    # Emission -----------------------------------------------------------------------------------

    def publish(self, series: Series, step: int | None, number: float) -> None:
        """Sets the gauges of a value and of its step, or lets them wait."""
        allowed = self.allowed()
        if self._closed or self._instruments is None:
            return
        if allowed:
            self._emit(self._instruments, series, step, number, int(not math.isfinite(number)))
        elif allowed is None:
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

    def _wait(self, series: Series, step: int | None, number: float) -> None:
        # Taken out and put in again: what was logged last goes out last, with its step.
        _, last, nonfinite = self._deferred.pop(series, (None, None, 0))
        if math.isfinite(number):
            self._deferred[series] = (step, number, nonfinite)
        else:
            self._deferred[series] = (step, last, nonfinite + 1)
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

    def _refresh(self) -> None:
        no_gauges = self._closed or self._instruments is None
        self.quiet = self._allowed is False or (no_gauges and not self._actions)


def utf8(text: str) -> str:
    """`text` with lone surrogates written out: one of them would cost the whole OTLP batch."""
    return text.encode("utf-8", "backslashreplace").decode()
