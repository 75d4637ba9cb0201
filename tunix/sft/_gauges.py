# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The stream of logged values: in log order, without waiting, onto OpenTelemetry gauges.

This module exists twice, byte for byte; `_scalars.py` says why.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.metrics import MeterProvider

from . import _process
from ._emitter import Emitter
from ._instruments import api
from ._scalars import (
    NOTHING,
    DeviceValue,
    Other,
    Ratio,
    Value,
    as_number,
    as_step,
    read,
    read_step,
)
from ._series import Entry, Group, Logged, Origin, Series, Store, keep_nothing, text_of

_log = logging.getLogger(__name__)

MAX_SERIES: Final = 4096
"""Distinct (prefix, name, mode) that one stream takes; what comes after them is dropped."""

MAX_WAITING: Final = 4096
"""Values that may wait in one (prefix, mode); the oldest is given up for the next."""

_GIVEN_UP: Final = Other(
    math.nan, f"lost: {MAX_WAITING:,} values were logged before it was computed", lost=True
)


class GaugeStream:
    """Logged values on their way to gauges.

    The contract:

    * `log` returns at once, whatever is logged: it waits for no device and no backend, and raises
      nothing.
    * `keep` is asked once for each series and returns its store, which gets every value of the
      series in log order as soon as it is known, on every process, also while nothing is emitted.
    * `observe` gets every value as a `Logged`, in log order within (prefix, mode), on every process
      and whether or not a provider is set, just before the gauges are set.
    * Both are called by whichever thread resolved the value, with the stream's lock held except
      for `Store.add`: they have to be quick and must not wait for another thread.
    * Gauges are set in the order of `observe`: the value, then the step gauge. A finite number goes
      to its gauge, any other counts on `tunix.training.nonfinite`.
    * Only process 0 emits unless `all_processes`; while no JAX backend exists, the last value of
      each series waits, and goes out by a later `log`, by `close` or at exit.
    * A process forked while the stream exists does not emit: it has the parent's identity.
    * Providers belong to the application: they are asked for instruments and nothing else.

    Args:
        version: Version of the library that logs, which becomes the version of scope `tunix`.
        meter_provider: None for the global one, also when that is set later.
        attributes: Added to every measurement; the stream's own win.
        all_processes: Whether every process emits, with `tunix.jax.process.index`.
        enabled: False emits nothing; `keep` and `observe` work.
        paced: Whether gauges wait for `emit_waiting`, which sets the last value of each series;
            `observe` is not delayed.
        keep: Makes the store of a series.
        observe: Sees every value.
    """

    def __init__(
        self,
        version: str,
        *,
        meter_provider: MeterProvider | None = None,
        attributes: Mapping[str, Any] | None = None,
        all_processes: bool = False,
        enabled: bool = True,
        paced: bool = False,
        keep: Callable[[Series], Store] | None = None,
        observe: Callable[[Logged], None] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        # What must not happen with the lock held: another thread may hold a log handler's lock and
        # be about to log a value here.
        self._due: deque[Callable[[], object]] = deque()
        self._emitter = Emitter(
            self,
            self._due,
            version,
            meter_provider,
            attributes or {},
            enabled=enabled,
            all_processes=all_processes,
            watched=observe is not None or not _GIL,
            paced=paced,
        )
        self._keep = keep or keep_nothing
        self._observe = observe
        self._index: dict[Any, Series] = {}
        self._waiting: dict[Group, None] = {}
        self._draining = False
        self._said: set[tuple[str, str]] = set()
        _process.register(self)

    # Logging ------------------------------------------------------------------------------------

    def log(
        self,
        prefix: Any,
        name: Any,
        value: Any,
        mode: Any,
        step: Any,
        origin: Origin | None = None,
    ) -> None:
        """Takes one value.

        Args:
            prefix: Metrics prefix; None and "" for none.
            name: The key.
            value: Anything; `_scalars.read` says what becomes of it.
            mode: A string, or an enum whose value is one.
            step: What is no whole number within int64 leaves the step gauge alone.
            origin: Where it was logged, where that is not here and now.
        """
        try:
            try:
                series = self._index[prefix, name, mode]
            except (KeyError, TypeError):  # new, or not hashable
                series = self.series_of(prefix, name, mode)
                if series is None:
                    self._run_due()
                    return
            result = value if type(value) is float else read(value)
            emitter = self._emitter
            if type(result) is float and emitter.quiet and api._METER_PROVIDER is emitter.seen:
                # Nothing to emit, nothing to keep in order: no lock, which would be half the cost.
                series.store.add(result)
                return
            with self._lock:
                self._take(series, result, step, origin)
        except Exception as error:
            self._note("log", type(error).__name__, f"A value was not logged: {error!r}")
        if self._due:
            self._run_due()

    def series_of(self, prefix: Any, name: Any, mode: Any) -> Series | None:
        """The series, made if there is none yet; None where the limit of series is reached."""
        key = (text_of(prefix), text_of(name), text_of(mode))
        with self._lock:
            series = self._emitter.find(*key)
            if series is None:
                if len(self._emitter) >= MAX_SERIES:
                    self._note("series", "", _TOO_MANY.format(key[1]))
                    return None
                series = self._emitter.add(*key, self._keep)
            if all(isinstance(part, str | enum.Enum | None) for part in (prefix, name, mode)):
                self._index[prefix, name, mode] = series
            return series

    def _take(self, series: Series, value: Value, step: Any, origin: Origin | None) -> None:
        emitter = self._emitter
        if api._METER_PROVIDER is not emitter.seen:
            try:
                emitter.follow_provider()
            except Exception as error:
                self._note("provider", "", f"The meter provider cannot be used: {error!r}")
        if type(value) is float and type(step) is int and not self._waiting:
            series.store.add(value)
            self._pass_on(series, value, value, step, origin)
            return
        self._drain()
        entry = Entry(series, value, read_step(step), origin)
        series.unresolved += 1
        if series.unresolved == 1 and not isinstance(value, DeviceValue | Ratio):
            self._store(entry, value)
        queue = series.group.queue
        if not queue and entry.ready():
            self._complete(entry)
            return
        if len(queue) >= MAX_WAITING:
            self._give_up(queue)
        queue.append(entry)
        if not self._waiting:
            _process.hold(self, self)
            _process.finish_before_the_rest()
        self._waiting[series.group] = None
        emitter.set_waiting(True)

    def _drain(self) -> None:
        """Emits what is ready, as far as log order allows; never waits."""
        if not self._waiting or self._draining:  # the latter: a provider or handler called back
            return
        self._draining = True
        try:
            for group in tuple(self._waiting):
                while group.queue and group.queue[0].ready():
                    self._complete(group.queue.popleft())
                if not group.queue:
                    del self._waiting[group]
            if not self._waiting:
                _process.release(self, self)
                self._emitter.set_waiting(False)
        finally:
            self._draining = False

    def _give_up(self, queue: deque[Entry]) -> None:
        oldest = queue.popleft()
        if isinstance(oldest.value, DeviceValue | Ratio):
            oldest.value = _GIVEN_UP
        if isinstance(oldest.step, DeviceValue | Ratio):
            oldest.step = None
        self._complete(oldest)

    def _resolve(self, entry: Entry) -> float | int | Other:
        if isinstance(entry.value, DeviceValue | Ratio):
            entry.value = entry.value.read()  # and the device array is let go
        self._store(entry, entry.value)
        return entry.value

    def _store(self, entry: Entry, value: float | int | Other) -> None:
        if entry.stored:
            return
        entry.stored = True
        series = entry.series
        series.unresolved -= 1
        kept = value.kept if isinstance(value, Other) else value
        if isinstance(kept, float):
            series.store.add(kept)
        elif kept is not NOTHING:
            series.store.add_object(kept, as_number(value))

    def _complete(self, entry: Entry) -> None:
        value = self._resolve(entry)
        step = entry.step
        if isinstance(step, DeviceValue | Ratio):
            step = as_step(step.read())
        if isinstance(value, Other):
            self._note("value", entry.series.name, _NOT_EMITTED.format(entry.series.name, value))
        kept = value.kept if isinstance(value, Other) else value
        token = otel_context.attach(entry.origin.context)
        try:
            self._pass_on(entry.series, kept, as_number(value), step, entry.origin)
        finally:
            otel_context.detach(token)

    def _pass_on(
        self,
        series: Series,
        kept: Any,
        number: float | None,
        step: int | None,
        origin: Origin | None,
    ) -> None:
        try:
            if self._observe is not None and kept is not NOTHING:
                self._observe(Logged(series, step, kept, number, origin or Origin.here()))
            if number is not None:
                self._emitter.publish(series, step, number)
        except Exception as error:
            self._note("emission", type(error).__name__, f"A value was not emitted: {error!r}")

    # Reading ------------------------------------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        """What to hold while a store is read."""
        return self._lock

    def __iter__(self) -> Iterator[Series]:
        with self._lock:
            return iter(list(self._emitter))

    def poll(self) -> None:
        """Takes in what the device has finished; waits for nothing."""
        with self._lock:
            self._drain()
        if self._due:
            self._run_due()

    def emit_waiting(self) -> None:
        """Takes in what the device has finished and sets the gauges that wait; any thread may."""
        with self._lock:
            self._drain()
            self._emitter.emit_waiting()
        if self._due:
            self._run_due()

    def find(self, prefix: Any, name: Any, mode: Any) -> Series | None:
        """The series, if anything was logged to it."""
        return self._emitter.find(text_of(prefix), text_of(name), text_of(mode))

    def settle(self, series: Series | None = None) -> None:
        """Waits for the device until every value logged so far is in its store.

        Args:
            series: Wait for this one only.
        """
        while True:
            with self._lock:
                if self._draining:  # called from inside an emission: what waits here waits for us
                    return
                self._drain()
                entry = self._first_unresolved(series)
            if entry is None:
                break
            entry.wait()
        if self._due:
            self._run_due()

    def _first_unresolved(self, series: Series | None) -> Entry | None:
        """The next entry to wait for; entries of `series` are resolved on the way."""
        if series is None:
            return next((group.queue[0] for group in self._waiting), None)
        for entry in series.group.queue if series.unresolved else ():
            if entry.series is series and not entry.stored:
                if not entry.ready():
                    return entry
                self._resolve(entry)
        return None

    def close(self) -> None:
        """Emits everything logged so far, waiting for the device, and then nothing any more.

        Stores go on being filled. A second call changes nothing.
        """
        self.finish()
        with self._lock:
            self._emitter.close()

    def finish(self) -> None:
        """Emits everything logged so far; no more will be known about this process."""
        try:
            self.settle()
            with self._lock:
                self._emitter.settle_last()
        except Exception as error:
            self._note("finish", type(error).__name__, f"Values were not emitted: {error!r}")
        self._run_due()

    # Policy -------------------------------------------------------------------------------------

    def allowed(self) -> bool | None:
        """Whether this process emits; None while no JAX backend exists."""
        with self._lock:
            allowed = self._emitter.allowed()
        if self._due:
            self._run_due()
        return allowed

    @property
    def process_index(self) -> int | None:
        """The process index, once it is known."""
        return self._emitter.index

    def defer(self, action: Callable[[bool], None]) -> None:
        """Calls `action` with the answer of `allowed` as soon as there is one."""
        with self._lock:
            self._emitter.defer(action)

    def after_fork_in_child(self) -> None:
        """Falls silent in the child, keeping what is in the stores."""
        self._lock = threading.RLock()
        # Freeing a device array in the child may wait for a lock that nobody will release.
        _leaked.append([group.queue for group in self._waiting])
        for group in self._waiting:
            group.queue = deque()
        for series in self._emitter:
            series.unresolved = 0
        self._waiting = {}
        self._due.clear()
        self._draining = False
        self._emitter.set_waiting(False)
        self._emitter.silence()

    # Warnings -----------------------------------------------------------------------------------

    def _note(self, kind: str, subject: str, text: str) -> None:
        """Warns once for each subject, as soon as the lock is free."""
        if (kind, subject) not in self._said:
            self._said.add((kind, subject))
            self._due.append(partial(_log.warning, "%s", text))

    def _run_due(self) -> None:
        while self._due:
            # Another thread may be faster, or a log handler raises.
            with contextlib.suppress(Exception):
                self._due.popleft()()


_GIL: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()
_leaked: list[object] = []
_TOO_MANY: Final = (
    "{!r} and further new metrics are dropped: "
    f"{MAX_SERIES:,} distinct (prefix, name, mode) have been logged. Names must not contain ids."
)
_NOT_EMITTED: Final = "A value of {0!r} is not emitted: it is {1.reason}. Told once for this name."
