# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Providers of a test's own, and what they were given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.instrumentation.tunix import metrics
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


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
        """Finished spans in the order they ended, of one name or all."""
        return [s for s in self._spans.get_finished_spans() if name in (None, s.name)]

    def names(self) -> list[str]:
        """Names of the finished spans in the order they ended."""
        return [span.name for span in self.spans()]

    def events(self, name: str | None = None) -> list[Any]:
        """Log records in the order they were emitted, of one event name or all."""
        records = [data.log_record for data in self._logs.get_finished_logs()]
        return [record for record in records if name in (None, record.event_name)]

    def gauges(self) -> dict[tuple[str, frozenset[tuple[str, object]]], float]:
        """Value of every data point now, by metric name and attributes."""
        self._tick()
        data = self._reader.get_metrics_data()
        return {
            (metric.name, frozenset(point.attributes.items())): point.value
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }

    def metric_scopes(self) -> list[Any]:
        """Instrumentation scopes that metrics came from."""
        self._tick()
        data = self._reader.get_metrics_data()
        return [scope.scope for r in data.resource_metrics for scope in r.scope_metrics]

    def _tick(self) -> None:
        # What the ticker's thread does a moment later.
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
