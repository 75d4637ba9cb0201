# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""One event per step with every number of it.

A periodic metric reader keeps the last value of a gauge and loses every step between two
collections. These events lose none: each step that the library logs, of each prefix and mode, is
one log record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ._series import Origin

_REMEMBERED: Final = 4096
_OPEN: Final = 256


class Step(NamedTuple):
    """A step that is complete.

    Attributes:
        prefix: Metrics prefix, "" for none.
        mode: "train", "eval" or what else was logged.
        step: The step as it was logged.
        values: Gauge name to finite value, in log order.
        nonfinite: Logged keys whose value was NaN or infinite.
        late: Whether an event of this step went out before.
        context: The OpenTelemetry context in which its last value was logged.
        time_ns: When that was, in nanoseconds since the epoch.
    """

    prefix: str
    mode: str
    step: int
    values: dict[str, float]
    nonfinite: list[str]
    late: bool
    context: Any
    time_ns: int


class _Open:
    __slots__ = ("context", "keys", "late", "nonfinite", "threads", "time_ns", "values")

    def __init__(self, late: bool) -> None:
        self.late = late
        self.keys: set[str] = set()
        self.values: dict[str, float] = {}
        self.nonfinite: list[str] = []
        self.threads: set[int] = set()
        self.context: Any = None
        self.time_ns = 0


class _Series:
    """The steps of one (prefix, mode)."""

    __slots__ = ("at", "open", "sent")

    def __init__(self) -> None:
        self.open: dict[int, _Open] = {}
        # The open step that each thread wrote to last: it has left it once it writes to another.
        self.at: dict[int, int] = {}
        # Steps that went out, oldest first; bounded, so a value later than that many steps after
        # its event counts as a new step.
        self.sent: dict[int, None] = {}


class StepCollector:
    """Gathers the values of one logger into steps and hands each over when it is complete.

    A step is complete when every thread that wrote to it has written to another step of the same
    prefix and mode, when a key repeats (a second evaluation at one step is a second occurrence),
    and at `flush`. A thread may write once and never again, so the oldest of more than 256 open
    steps of one prefix and mode counts as complete too. A value for a step that went out already
    makes one more, marked late.

    Not thread-safe: the caller holds a lock, as the gauge stream does when it resolves values.

    Args:
        emit: Takes each complete step.
    """

    def __init__(self, emit: Callable[[Step], None]) -> None:
        self._emit = emit
        self._series: dict[tuple[str, str], _Series] = {}

    def add(
        self,
        prefix: str,
        mode: str,
        key: str,
        gauge: str,
        step: int,
        value: float,
        origin: Origin,
    ) -> None:
        """Takes one logged number.

        Args:
            prefix: Metrics prefix.
            mode: Mode.
            key: The metric's name as it was logged.
            gauge: Name of its gauge.
            step: Step it belongs to.
            value: The number; NaN and infinities are named, not valued.
            origin: Where and when it was logged.
        """
        series = self._series.get((prefix, mode))
        if series is None:
            series = self._series[prefix, mode] = _Series()
        thread = origin.thread
        before = series.at.get(thread)
        if before is not None and before != step:
            self._leave(prefix, mode, series, thread, before)
        opened = series.open.get(step)
        if opened is not None and key in opened.keys:
            self._complete(prefix, mode, series, step)
            opened = _Open(late=opened.late)
            series.open[step] = opened
        elif opened is None:
            opened = series.open[step] = _Open(late=step in series.sent)
        if len(series.open) > _OPEN:
            self._complete(prefix, mode, series, next(iter(series.open)))
        series.at[thread] = step
        opened.keys.add(key)
        opened.threads.add(thread)
        opened.context = origin.context
        opened.time_ns = origin.time_ns
        if math.isfinite(value):
            # Two keys may share a gauge name; the key tells the second one apart.
            name = gauge if gauge not in opened.values else f"{gauge}[{key}]"
            opened.values[name] = value
        else:
            opened.nonfinite.append(key)

    def has_open_steps(self) -> bool:
        """Whether a step waits for more values."""
        return any(series.open for series in self._series.values())

    def flush(self, belongs: Callable[[Any], bool] = lambda _: True) -> None:
        """Hands over open steps, in the order in which they were begun.

        Args:
            belongs: Says of the context of a step's last value whether the step is meant.
        """
        for (prefix, mode), series in list(self._series.items()):
            for step, opened in list(series.open.items()):
                if belongs(opened.context):
                    self._complete(prefix, mode, series, step)

    def _leave(self, prefix: str, mode: str, series: _Series, thread: int, step: int) -> None:
        left = series.open[step]
        left.threads.discard(thread)
        if not left.threads:
            self._complete(prefix, mode, series, step)

    def _complete(self, prefix: str, mode: str, series: _Series, step: int) -> None:
        done = series.open.pop(step)
        for thread in done.threads:
            del series.at[thread]
        series.sent.pop(step, None)
        series.sent[step] = None
        if len(series.sent) > _REMEMBERED:
            del series.sent[next(iter(series.sent))]
        self._emit(
            Step(
                prefix,
                mode,
                step,
                done.values,
                done.nonfinite,
                done.late,
                done.context,
                done.time_ns,
            )
        )
