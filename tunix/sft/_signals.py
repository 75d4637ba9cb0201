# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Spans and events of a `MetricsLogger`, under the process policy of its gauges."""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
from opentelemetry import context as otel_context
from opentelemetry import trace

from tunix.sft import _instruments
from tunix.sft._gauges import GaugeStream
from tunix.sft._scalars import Other, read
from tunix.sft._series import utf8

_log = logging.getLogger(__name__)
_events = logging.getLogger("tunix.events")
_EVENT_NAME: Final = "event.name"

# What an attribute must not be called beside the fields and methods that a record really has:
# what formatting adds, and what names the event in one release of the bridge or another.
_TAKEN: Final = frozenset({"message", "asctime", "taskName", _EVENT_NAME, "otel.event.name"})
_INT64: Final = range(-(2**63), 2**63)


class Signals:
    """Starts spans and logs events where the stream's process policy allows it.

    Args:
        stream: Says whether this process emits.
        tracer: Where spans come from.
        attributes: Added to every span and event.
        all_processes: Whether the process index is an attribute too.
    """

    def __init__(
        self,
        stream: GaugeStream,
        tracer: trace.Tracer,
        attributes: Mapping[str, Any],
        *,
        all_processes: bool,
    ) -> None:
        self._stream = stream
        self._tracer = tracer
        self._attributes = dict(attributes)
        self._all_processes = all_processes
        self._failed = False

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, Any] | None) -> Iterator[trace.Span]:
        """A span around a block; the block's exceptions are recorded and pass unchanged."""
        manager, span = self._enter(name, attributes)
        if manager is None:
            yield span
            return
        try:
            yield span
        except BaseException:
            self._leave(manager, span)
            raise
        self._leave(manager, span)

    def _enter(
        self, name: str, attributes: Mapping[str, Any] | None
    ) -> tuple[AbstractContextManager[trace.Span] | None, trace.Span]:
        try:
            allowed = self._stream.allowed()
            if allowed is not False:
                # A span that is never ended is never exported: it ends when this process is known
                # to be one that emits.
                manager = self._tracer.start_as_current_span(
                    str(name), attributes=self._merged(attributes), end_on_exit=False
                )
                return manager, manager.__enter__()
        except Exception:
            self._report()
        return None, trace.INVALID_SPAN

    def _leave(self, manager: AbstractContextManager[trace.Span], span: trace.Span) -> None:
        try:
            manager.__exit__(*sys.exc_info())
            allowed = self._stream.allowed()
            if allowed:
                span.end()
            elif allowed is None:
                self._stream.defer(_end(span, time.time_ns()))
        except Exception:
            self._report()

    def event(
        self, name: str, body: object, attributes: Mapping[str, Any] | None, severity: int | str
    ) -> None:
        """Logs one record; never raises."""
        try:
            level = _level(severity)
            allowed = self._stream.allowed()
            if allowed is False or not _events.isEnabledFor(level):
                return
            name = utf8(str(name))
            file, line, function, _ = _events.findCaller(stacklevel=3)
            message = name if body is None else _body(body)
            record = _events.makeRecord(
                _events.name, level, file, line, message, (), None, function
            )
            # Not through `extra`, which raises for the fields that a record factory has added.
            for key, value in self._merged(attributes).items():
                vars(record)[_free(key, record)] = value
            vars(record)[_EVENT_NAME] = name
            if allowed:
                _events.handle(record)
            else:
                self._stream.defer(_handle(record))
        except Exception:
            self._report()

    def _merged(self, attributes: Mapping[str, Any] | None) -> dict[str, Any]:
        merged = dict(self._attributes)
        for key, value in (attributes or {}).items():
            plain = _attribute(value)
            if plain is not None:
                merged[utf8(str(key))] = plain
        if self._all_processes and self._stream.process_index is not None:
            merged[_instruments.PROCESS_INDEX] = self._stream.process_index
        return merged

    def _report(self) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("A span or an event failed; further failures are not told", exc_info=True)


def _end(span: trace.Span, end_time: int) -> Any:
    return lambda allowed: span.end(end_time) if allowed else None


def _handle(record: logging.LogRecord) -> Any:
    context = otel_context.get_current()

    def handle(allowed: bool) -> None:
        if allowed:
            token = otel_context.attach(context)
            try:
                _events.handle(record)
            finally:
                otel_context.detach(token)

    return handle


def _level(severity: int | str) -> int:
    if isinstance(severity, str):
        return logging.getLevelNamesMapping().get(severity.upper(), logging.INFO)
    return severity if isinstance(severity, int) else logging.INFO


def _free(key: str, record: logging.LogRecord) -> str:
    key = key or "_"
    while key in _TAKEN or hasattr(record, key):
        key += "_"
    return key


def _attribute(value: Any) -> Any:
    """A value that a span or log attribute may have; None for none."""
    if isinstance(value, Mapping):
        return str({str(key): _scalar(item) for key, item in value.items()})
    array = isinstance(value, np.ndarray) and value.ndim == 1
    if array or isinstance(value, list | tuple | set | frozenset):
        items = [_scalar(item) for item in value]
        alike = len({type(item) for item in items}) < 2 and None not in items
        return items if alike else [str(item) for item in items]
    return _scalar(value)


def _body(value: Any, depth: int = 8) -> Any:
    if depth and isinstance(value, Mapping):
        return {
            utf8(str(key)): _body(item, depth - 1)
            for key, item in value.items()
            if item is not None
        }
    if depth and isinstance(value, list | tuple):
        return [_body(item, depth - 1) for item in value]
    # The encoder of OpenTelemetry 1.25 loses the batch over a None.
    return "None" if value is None else _scalar(value)


def _scalar(value: Any) -> str | bool | int | float | None:
    """One value as Python's own type, which is all that OTLP carries.

    Nothing is waited for: a device value that is not there yet is text that says so.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str | bytes):
        return utf8(value if isinstance(value, str) else value.decode("utf-8", "backslashreplace"))
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    known = read(value)
    if isinstance(known, float):
        kind = getattr(getattr(value, "dtype", None), "kind", None)
        if not isinstance(value, int) and kind not in ("i", "u"):
            return known
        known = int(known)
    if isinstance(known, int):
        return known if known in _INT64 else str(known)
    return utf8(str(known.kept)) if isinstance(known, Other) else "<not computed yet>"
