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
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from . import library, semconv
from .version import __version__

if TYPE_CHECKING:
    # The logs and metrics API are imported where they are first used: every Python process of an
    # instrumented tree imports this module, few of them train.
    from opentelemetry._logs import Logger, LoggerProvider
    from opentelemetry.metrics import MeterProvider

_log = logging.getLogger(__package__)

# Ways to leave a call that are not failures of the call: they are marked, not made errors.
_INTERRUPTS: Final = (KeyboardInterrupt, GeneratorExit)
_END_OF_DATA: Final = (StopIteration, StopAsyncIteration)


class Telemetry:
    """What one `instrument()` call emits through.

    Providers are the application's: they are asked for instruments and never created, flushed or
    shut down here. Without an explicit provider the global one counts, also when it is set later.

    Attributes:
        meter_provider: Where gauges go; None for the global provider.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        self.meter_provider = meter_provider
        self._logger_provider = logger_provider
        self._tracer = trace.get_tracer(
            semconv.SCOPE, __version__, tracer_provider, semconv.SCHEMA_URL
        )
        # Identity of the exception that was logged last: it passes several spans on its way out
        # and is one event. An identity, not the object, whose traceback holds frames alive.
        self._logged_exception: int | None = None

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

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        context: otel_context.Context | None = None,
        links: Sequence[Link] = (),
        start_time: int | None = None,
    ) -> Span:
        """Starts a span of kind INTERNAL; `start_time` in nanoseconds since the epoch."""
        return self._tracer.start_span(
            name, context, SpanKind.INTERNAL, attributes, links, start_time
        )

    def record_outcome(self, span: Span, exception: BaseException | None) -> None:
        """Sets status and attributes that tell how the call of a span ended.

        Args:
            span: The span, not ended yet.
            exception: What the call raised, None when it returned.
        """
        if exception is None or isinstance(exception, _END_OF_DATA):
            return
        if _is_interrupt(exception):
            span.set_attribute(semconv.INTERRUPTED, type(exception).__qualname__)
            return
        span.set_attribute(semconv.ERROR_TYPE, _class_name(exception))
        span.set_status(Status(StatusCode.ERROR, str(exception)))
        if self._logged_exception != id(exception):
            self._logged_exception = id(exception)
            self._log_exception(span, exception)

    def _log_exception(self, span: Span, exception: BaseException) -> None:
        from opentelemetry._logs import SeverityNumber

        self.logger.emit(
            event_name=semconv.EXCEPTION,
            severity_number=SeverityNumber.ERROR,
            severity_text="ERROR",
            exception=exception,
            context=trace.set_span_in_context(span),
        )


class SpanScope:
    """A span around a `with` block, current inside it and ended with the block's outcome.

    The block's exceptions pass unchanged. Failures of telemetry itself (a broken provider or span
    processor) are logged once and the block runs without a span.
    """

    __slots__ = ("_current", "_span", "_telemetry", "_token")

    def __init__(self, telemetry: Telemetry, span: Span | None, *, current: bool = True) -> None:
        self._telemetry = telemetry
        self._span = span
        self._current = current
        self._token: object | None = None

    def __enter__(self) -> Span | None:
        """Makes the span current."""
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
            otel_context.detach(self._token)  # pyright: ignore[reportArgumentType]
        if self._span is None:
            return
        try:
            self._telemetry.record_outcome(self._span, exception)
        except Exception:
            report_failure("ending a span")
        try:
            self._span.end()
        except Exception:
            report_failure("ending a span")


_active: Telemetry | None = None
_reported: set[str] = set()


def active() -> Telemetry | None:
    """The telemetry to emit through now; None when uninstrumented or suppressed here."""
    if _active is None or not is_instrumentation_enabled():
        return None
    return _active


def activate(telemetry: Telemetry | None) -> None:
    """Makes `telemetry` the one that every wrapper uses; None silences them all."""
    global _active
    _active = telemetry


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


def _class_name(exception: BaseException) -> str:
    cls = type(exception)
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_interrupt(exception: BaseException) -> bool:
    if isinstance(exception, SystemExit):
        return exception.code in (None, 0)
    # Cancellation is told by its class name, which asyncio and concurrent.futures share, instead
    # of importing either into every Python process of an instrumented tree.
    return isinstance(exception, _INTERRUPTS) or type(exception).__name__ == "CancelledError"
