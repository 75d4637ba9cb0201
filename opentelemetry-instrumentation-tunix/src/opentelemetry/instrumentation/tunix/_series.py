# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the stream of values is made of: series, their groups and stores, values that wait.

This module exists twice, byte for byte; `_scalars.py` says why.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from opentelemetry import context as otel_context
from opentelemetry import metrics
from opentelemetry.context import Context

from . import _instruments as names
from ._scalars import DeviceValue, Ratio, Value


class Store(Protocol):
    """Where the values of one series are kept, in log order, as soon as each is known."""

    def add(self, number: float) -> None:
        """Keeps a number that float64 holds, NaN and infinities included.

        Called by many threads at once, without a lock where the interpreter has its global one.
        """
        ...

    def add_object(self, kept: object, number: float | None) -> None:
        """Keeps anything else; `number` stands for it in a mean, None leaves it out."""
        ...


class Origin(NamedTuple):
    """Where and when a value was logged.

    Attributes:
        thread: `threading.get_ident()` of the call that logged it.
        context: The OpenTelemetry context of that call.
        time_ns: Its time, in nanoseconds since the epoch.
    """

    thread: int
    context: Context
    time_ns: int

    @classmethod
    def here(cls) -> Origin:
        """This thread, its context, now."""
        return cls(threading.get_ident(), otel_context.get_current(), time.time_ns())


class Logged(NamedTuple):
    """One logged value, resolved.

    Attributes:
        series: Where it belongs: prefix, name, mode and gauge name.
        step: The step; None where what was passed is no whole number.
        kept: The value on the host; for a number that float64 holds, `number` itself.
        number: What a gauge would show, NaN and infinities included; None for what is no number.
        origin: Where and when it was logged.
    """

    series: Series
    step: int | None
    kept: object
    number: float | None
    origin: Origin


class _NoStore:
    def add(self, number: float) -> None:
        pass

    def add_object(self, kept: object, number: float | None) -> None:
        pass


def keep_nothing(series: Series) -> Store:
    """The store of a stream whose values nobody reads again."""
    del series
    return _NO_STORE


_NO_STORE: Final = _NoStore()


class Group:
    """A (prefix, mode): its values share a step gauge and are emitted in log order."""

    __slots__ = ("attributes", "gauge", "mode", "prefix", "queue")

    def __init__(self, prefix: str, mode: str) -> None:
        self.prefix = prefix
        self.mode = mode
        self.attributes: dict[str, Any] = {}
        self.gauge: metrics._Gauge | None = None
        self.queue: deque[Entry] = deque()


class Series:
    """A (prefix, name, mode).

    Attributes:
        prefix: The metrics prefix, "" for none.
        name: The key as it was logged.
        mode: "train", "eval" or what else was logged.
        gauge_name: The instrument's name.
        store: What the stream's `keep` returned for this series.
        unresolved: How many logged values are not in the store yet.
    """

    __slots__ = (
        *("attributes", "count_attributes", "gauge", "gauge_name", "group", "mode", "name"),
        *("prefix", "store", "unresolved"),
    )

    def __init__(self, group: Group, name: str, keep: Callable[[Series], Store]) -> None:
        self.group = group
        self.prefix = group.prefix
        self.name = name
        self.mode = group.mode
        self.gauge_name = names.gauge_name(name)
        self.attributes: dict[str, Any] = {}
        self.count_attributes: dict[str, Any] = {}
        self.gauge: metrics._Gauge | None = None
        self.unresolved = 0
        self.store = keep(self)


class Entry:
    """A value that waits: for the device, or for what was logged before it."""

    __slots__ = ("origin", "series", "step", "stored", "value")

    def __init__(
        self,
        series: Series,
        value: Value,
        step: int | DeviceValue | Ratio | None,
        origin: Origin | None,
    ) -> None:
        self.series = series
        self.value = value
        self.step = step
        self.stored = False
        self.origin = origin or Origin.here()

    def ready(self) -> bool:
        return all(part.ready() for part in self._on_device())

    def wait(self) -> None:
        for part in self._on_device():
            part.wait()

    def _on_device(self) -> list[DeviceValue | Ratio]:
        return [part for part in (self.value, self.step) if isinstance(part, DeviceValue | Ratio)]


def text_of(value: Any) -> str:
    if type(value) is str:
        return value
    if isinstance(value, enum.Enum):
        value = value.value
    return "" if value is None else str(value)


def utf8(text: str) -> str:
    """`text` with lone surrogates written out: one of them would cost the whole OTLP batch."""
    return text.encode("utf-8", "backslashreplace").decode()
