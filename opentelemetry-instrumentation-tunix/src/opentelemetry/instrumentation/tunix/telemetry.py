# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Tracer, logger and the one way in which a call of the library becomes a span.

`Telemetry` is made by `instrument()` and replaced by the next one; wrappers ask `active()` at each
call, so that everything which was wrapped, cached or handed out before falls silent the moment
`uninstrument()` returns.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,  # pyright: ignore[reportPrivateUsage]
)
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from . import library, semconv
from .config import Options
from .version import __version__

if TYPE_CHECKING:
    # The logs and metrics API are imported where they are first used: every Python process of an
    # instrumented tree imports this module, few of them train.
    from opentelemetry._logs import Logger, LoggerProvider
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.util.types import AnyValue

    from .instruments import Instruments

_log = logging.getLogger(__package__)

# Ways to leave a call that are not failures of the call: they are marked, not made errors.
_INTERRUPTS: Final = (KeyboardInterrupt, GeneratorExit)
_LONGEST_MESSAGE: Final = 4096
_END_OF_DATA: Final = (StopIteration, StopAsyncIteration)


class Voice:
    """What a process says; plain strings, for an enum costs every process half a millisecond."""

    ALL: Final = "all"
    ERRORS: Final = "errors"
    NOTHING: Final = "nothing"
    UNDECIDED: Final = "undecided"


class Telemetry:
    """What one `instrument()` call emits through.

    Providers are the application's: they are asked for instruments and never created, flushed or
    shut down here. Without an explicit provider the global one counts, also when it is set later.

    Attributes:
        options: What the user chose.
        span_groups: Groups of spans that are drawn.
        meter_provider: Where gauges go; None for the global provider.
    """

    def __init__(
        self,
        options: Options,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        self.options = options
        self.span_groups = frozenset(options.span_groups or ())
        self.meter_provider = meter_provider
        self._logger_provider = logger_provider
        self._tracer = trace.get_tracer(
            semconv.SCOPE, __version__, tracer_provider, semconv.SCHEMA_URL
        )
        self._silenced = False
        self._voice: str | None = None
        self._process_attributes: dict[str, AttributeValue] = {}
        self._logged = _Logged()

    @functools.cached_property
    def library(self) -> library.Library | None:
        """The instrumented distribution; None where it is not known."""
        return library.detect()

    @functools.cached_property
    def logger(self) -> Logger:
        """Where events go."""
        from opentelemetry import _logs

        return _logs.get_logger(
            semconv.SCOPE, __version__, self._logger_provider, semconv.SCHEMA_URL
        )

    @property
    def instruments(self) -> Instruments | None:
        """What is measured with; None while there is nothing to measure for."""
        if self._silenced or self.voice != Voice.ALL:
            return None
        from .instruments import instruments_of

        return instruments_of(self.meter_provider)

    def silence(self) -> None:
        """Ends all measuring: what was begun before may still end."""
        self._silenced = True

    @property
    def voice(self) -> str:
        """What this process says, by the process policy.

        Undecided before a JAX backend exists: nobody knows which process this is then, and asking
        would create one.
        """
        if self._voice is None:
            from ._process import process_index

            index = process_index()
            if index is None:
                return Voice.UNDECIDED
            policy = self.options.processes
            if index == 0 or policy == "all":
                self._voice = Voice.ALL
            else:
                self._voice = Voice.ERRORS if policy == "errors" else Voice.NOTHING
            if policy != "zero":
                self._process_attributes = {semconv.PROCESS_INDEX: index}
        return self._voice

    @property
    def process_attributes(self) -> dict[str, AttributeValue]:
        """What tells this process from the others, where more than one may speak."""
        return self._process_attributes

    def start_span(
        self,
        name: str,
        *,
        context: otel_context.Context | None = None,
        links: Sequence[Link] = (),
        start_time: int | None = None,
    ) -> Span:
        """Starts a span of kind INTERNAL; `start_time` in nanoseconds since the epoch."""
        return self._tracer.start_span(name, context, SpanKind.INTERNAL, None, links, start_time)

    def log_event(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        body: AnyValue = None,
        span: Span | None = None,
        context: otel_context.Context | None = None,
        time_ns: int | None = None,
        health: bool = False,
    ) -> None:
        """Emits an event, tied to `span`, else to `context`, else to what is current.

        `time_ns` is nanoseconds since the epoch; None for now. What concerns the health of a run
        is told at WARN, and also by processes that tell of errors only; anything else at INFO.
        """
        if self.voice == Voice.NOTHING or (self.voice == Voice.ERRORS and not health):
            return
        try:
            from opentelemetry._logs import SeverityNumber

            severity = SeverityNumber.WARN if health else SeverityNumber.INFO
            self.logger.emit(
                event_name=name,
                timestamp=time_ns or time.time_ns(),
                severity_number=severity,
                severity_text=severity.name,
                body=body,
                attributes={**attributes, **self._process_attributes},
                context=context if span is None else trace.set_span_in_context(span),
            )
        except Exception:
            report_failure(f"emitting {name}")

    def begin(self) -> None:
        """A block of this thread begins: what it raises is another exception than the last one."""
        self._logged.exception = None

    def record_outcome(
        self, span: Span, exception: BaseException | None, *, message: bool = True
    ) -> None:
        """Sets status and attributes that tell how the call of a span ended.

        Args:
            span: The span, not ended yet.
            exception: What the call raised, None when it returned.
            message: Whether the exception's message may leave: out of a reward function, a rollout
                or an environment it may quote a prompt.
        """
        if exception is None or isinstance(exception, _END_OF_DATA):
            return
        if _is_interrupt(exception):
            span.set_attribute(semconv.INTERRUPTED, type(exception).__qualname__)
            return
        span.set_attribute(semconv.ERROR_TYPE, class_name(exception))
        text = _text_of(exception) if message else None
        span.set_status(Status(StatusCode.ERROR, text))
        if self._logged.exception != id(exception):
            self._logged.exception = id(exception)
            self._log_exception(span, exception, text)

    def _log_exception(self, span: Span, exception: BaseException, text: str | None) -> None:
        from opentelemetry._logs import SeverityNumber

        # Not the exception itself, which the SDK would format: a message that is no valid UTF-8
        # makes the encoder lose the whole batch.
        described: dict[str, AttributeValue] = {semconv.EXCEPTION_TYPE: class_name(exception)}
        if text is not None:
            described[semconv.EXCEPTION_MESSAGE] = text
            stack = "".join(traceback.format_exception(exception))
            described[semconv.EXCEPTION_STACKTRACE] = _utf8(stack)
        self.logger.emit(
            event_name=semconv.EXCEPTION,
            timestamp=time.time_ns(),
            severity_number=SeverityNumber.ERROR,
            severity_text="ERROR",
            attributes={**described, **self._process_attributes},
            context=trace.set_span_in_context(span),
        )


class SpanScope:
    """A span around a `with` block, current inside it and ended with the block's outcome.

    The block's exceptions pass unchanged. Failures of telemetry itself (a broken provider or span
    processor) are logged once and the block runs without a span. A process that says errors only
    makes the span when the block has failed.

    Args:
        telemetry: What to emit through.
        name: Span name.
        attributes: Makes the attributes; called only for a span that is recorded.
        links: Links of the span.
        current: Whether the span is current inside the block.
        start_time: Nanoseconds since the epoch; None for the beginning of the block.
        end_time: Nanoseconds since the epoch; None for the end of the block.
        message: Whether the message of an exception may leave.
    """

    __slots__ = (
        *("_attributes", "_current", "_end", "_links", "_message", "_name", "_span"),
        *("_start", "_telemetry", "_token"),
    )

    def __init__(
        self,
        telemetry: Telemetry,
        name: str,
        attributes: Callable[[], Mapping[str, AttributeValue]],
        *,
        links: Sequence[Link] = (),
        current: bool = True,
        start_time: int | None = None,
        end_time: int | None = None,
        message: bool = True,
    ) -> None:
        self._message = message
        self._end = end_time
        self._telemetry = telemetry
        self._name = name
        self._attributes = attributes
        self._links = links
        self._current = current
        self._start = start_time
        self._span: Span | None = None
        self._token: Token[otel_context.Context] | None = None

    def __enter__(self) -> Span | None:
        """Starts the span and makes it current."""
        self._telemetry.begin()
        if self._telemetry.voice == Voice.ERRORS:
            self._start = self._start or time.time_ns()
            return None
        try:
            self._begin()
        except Exception:
            report_failure(f"starting {self._name}")
        if self._span is not None and self._current:
            self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the span; never suppresses the exception."""
        if self._token is not None:
            otel_context.detach(self._token)
        try:
            errors_only = self._span is None and self._telemetry.voice == Voice.ERRORS
            if errors_only and is_failure(exception):
                self._begin()
            if self._span is not None:
                self._telemetry.record_outcome(self._span, exception, message=self._message)
        except Exception:
            report_failure(f"ending {self._name}")
        try:
            if self._span is not None:
                self._span.end(self._end)
        except Exception:
            report_failure(f"ending {self._name}")

    def _begin(self) -> None:
        self._span = self._telemetry.start_span(
            self._name, links=self._links, start_time=self._start
        )
        if self._span.is_recording():
            self._span.set_attributes(self._attributes())


_active: Telemetry | None = None
_reported: set[str] = set()


def active() -> Telemetry | None:
    """The telemetry to emit through now; None when this process or this context is silent."""
    telemetry = _active
    if telemetry is None:
        return None
    # is_instrumentation_enabled() for a third of its time: this runs at every logged value.
    context = otel_context.get_current()
    if context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get("suppress_instrumentation"):
        return None
    return None if telemetry.voice == Voice.NOTHING else telemetry


def activate(telemetry: Telemetry | None) -> Telemetry | None:
    """Makes `telemetry` the one that every wrapper uses, and returns the one before.

    None silences all wrappers.
    """
    global _active
    before, _active = _active, telemetry
    return before


def report_failure(doing: str) -> None:
    """Logs the exception being handled, once for each thing that failed: the run goes on."""
    if doing not in _reported:
        _reported.add(doing)
        _log.warning(
            "Telemetry failed while %s; the run is not affected. Further failures of this kind "
            "are not logged.",
            doing,
            exc_info=sys.exc_info(),
        )


class _Logged(threading.local):
    """The exception that this thread has logged last, by identity.

    It passes several spans on its way out and is one event. An identity and not the object, whose
    traceback keeps frames, and what they hold, alive.
    """

    exception: int | None = None


def _text_of(exception: BaseException) -> str:
    try:
        return _utf8(str(exception))[:_LONGEST_MESSAGE]
    except Exception:
        return f"<{class_name(exception)} whose text cannot be had>"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def class_name(exception: BaseException) -> str:
    """The qualified name of an exception's class, as `error.type` shows it."""
    cls = type(exception)
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def is_failure(exception: BaseException | None) -> bool:
    """Whether a call that ended with this exception has failed; see `record_outcome`."""
    return not (
        exception is None or isinstance(exception, _END_OF_DATA) or _is_interrupt(exception)
    )


def _is_interrupt(exception: BaseException) -> bool:
    if isinstance(exception, SystemExit):
        return exception.code in (None, 0)
    # Cancellation is told by its class name, which asyncio and concurrent.futures share, instead
    # of importing either into every Python process of an instrumented tree.
    return isinstance(exception, _INTERRUPTS) or type(exception).__name__ == "CancelledError"
