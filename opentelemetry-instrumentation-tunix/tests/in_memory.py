# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Providers of a test's own, and what they were given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.instrumentation.tunix import metrics, semconv
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def settle() -> None:
    """Waits for the devices and has their work told of, as the ticker does a moment later."""
    if "jax" in sys.modules:
        from opentelemetry.instrumentation.tunix import device

        device.WATCHERS.wait()


@dataclass
class Collected:
    """What an instrumented block emitted."""

    tracer_provider: TracerProvider = field(default_factory=TracerProvider)
    meter_provider: MeterProvider = field(init=False)
    logger_provider: LoggerProvider = field(default_factory=LoggerProvider)

    def __post_init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._logs = InMemoryLogRecordExporter()
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self._logs))
        self._reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self._reader])

    def providers(self) -> dict[str, object]:
        """Keyword arguments of `instrument()`."""
        return {
            "tracer_provider": self.tracer_provider,
            "meter_provider": self.meter_provider,
            "logger_provider": self.logger_provider,
        }

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Finished spans in the order they ended, of one name or all.

        Without a name, none of compilations: what a test compiles depends on the tests before it.
        """
        settle()
        finished = self._spans.get_finished_spans()
        if name is None:
            return [span for span in finished if span.name != semconv.JIT_COMPILE]
        return [span for span in finished if span.name == name]

    def names(self) -> list[str]:
        """Names of the finished spans in the order they ended."""
        return [span.name for span in self.spans()]

    def events(self, name: str | None = None) -> list[Any]:
        """Log records in the order they were emitted, of one event name or all."""
        records = [data.log_record for data in self._logs.get_finished_logs()]
        return [record for record in records if name in (None, record.event_name)]

    def gauges(self) -> dict[tuple[str, frozenset[tuple[str, object]]], float]:
        """Value of every gauge and counter of scope `tunix` now, by name and attributes."""
        return {
            (metric.name, frozenset(point.attributes.items())): point.value
            for scope, metric, point in self._points()
            if scope.name == semconv.GAUGE_SCOPE
        }

    def points(self, name: str) -> list[Any]:
        """Data points of one metric now."""
        return [point for _, metric, point in self._points() if metric.name == name]

    def metric_scopes(self) -> list[Any]:
        """Instrumentation scopes that metrics came from."""
        return list({scope.name: scope for scope, _, _ in self._points()}.values())

    def _points(self) -> Iterator[tuple[Any, Any, Any]]:
        self._tick()
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        yield scope.scope, metric, point

    def _tick(self) -> None:
        # What the ticker's thread does a moment later.
        settle()
        for steps in metrics._streams.values():
            steps.tick()

    def clear(self) -> None:
        """Forgets spans and log records."""
        self._spans.clear()
        self._logs.clear()

    def shutdown(self) -> None:
        """Ends the providers, whose threads would outlive the test."""
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()
        self.logger_provider.shutdown()
