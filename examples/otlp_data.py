# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""OTLP messages as plain Python values: spans, metric data points and log records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from google.protobuf.message import Message
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Signal = Literal["traces", "metrics", "logs"]
Attributes = dict[str, Any]
"""Values keep their OTLP type: str, bool, int, float, bytes, list, dict or None."""


@dataclass(frozen=True)
class Scope:
    """The instrumentation scope that emitted something."""

    name: str
    version: str
    schema_url: str
    attributes: Attributes


@dataclass(frozen=True)
class SpanEvent:
    """An event on a span."""

    name: str
    time_ns: int
    attributes: Attributes


@dataclass(frozen=True)
class SpanLink:
    """A link from a span; ids in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    attributes: Attributes


@dataclass(frozen=True)
class Span:
    """A finished span; ids in lower-case hexadecimal, `parent_id` is None for a root.

    `kind` is `INTERNAL`, `SERVER`, `CLIENT`, `PRODUCER`, `CONSUMER` or `UNSPECIFIED`; `status` is
    `UNSET`, `OK` or `ERROR`.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    kind: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    status: str
    status_description: str
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...]
    scope: Scope
    resource: Attributes

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class MetricPoint:
    """One data point of one metric.

    `kind` is `gauge`, `sum`, `histogram` or `exponential_histogram`. The first two carry `value`
    with its exact type, the others `count`, `sum`, `min` and `max`, and explicit buckets also
    `bounds` and `bucket_counts`. `temporality` is `CUMULATIVE`, `DELTA` or, for gauges, None.
    """

    name: str
    description: str
    unit: str
    kind: str
    attributes: Attributes
    start_ns: int
    time_ns: int
    value: int | float | None
    count: int | None
    sum: float | None
    min: float | None
    max: float | None
    bounds: tuple[float, ...]
    bucket_counts: tuple[int, ...]
    temporality: str | None
    monotonic: bool | None
    scope: Scope
    resource: Attributes


@dataclass(frozen=True)
class LogRecord:
    """A log record; an event where `event_name` is not empty. Missing ids are None."""

    event_name: str
    body: Any
    severity_number: int
    severity_text: str
    attributes: Attributes
    time_ns: int
    observed_ns: int
    trace_id: str | None
    span_id: str | None
    scope: Scope
    resource: Attributes


def _value(value: Any) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case field:
            return getattr(value, field)


def _attributes(pairs: Any) -> Attributes:
    return {pair.key: _value(pair.value) for pair in pairs}


def _enum_name(enum: Any, number: int, prefix: str) -> str:
    # Enums of proto3 are open: a newer client may send a number without a name here.
    return enum.Name(number).removeprefix(prefix) if number in enum.values() else str(number)


def _scoped(resources: Any, scopes: str, items: str) -> Iterator[tuple[Any, Scope, Attributes]]:
    """Walks resource → scope → item, the nesting that all three signals share."""
    for by_resource in resources:
        resource = _attributes(by_resource.resource.attributes)
        for by_scope in getattr(by_resource, scopes):
            scope = Scope(
                name=by_scope.scope.name,
                version=by_scope.scope.version,
                schema_url=by_scope.schema_url,
                attributes=_attributes(by_scope.scope.attributes),
            )
            for item in getattr(by_scope, items):
                yield item, scope, resource


def _spans(message: Any) -> Iterator[Span]:
    for span, scope, resource in _scoped(message.resource_spans, "scope_spans", "spans"):
        yield Span(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex() or None,
            kind=_enum_name(trace_pb2.Span.SpanKind, span.kind, "SPAN_KIND_"),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_attributes(span.attributes),
            status=_enum_name(trace_pb2.Status.StatusCode, span.status.code, "STATUS_CODE_"),
            status_description=span.status.message,
            events=tuple(
                SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes))
                for event in span.events
            ),
            links=tuple(
                SpanLink(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes))
                for link in span.links
            ),
            scope=scope,
            resource=resource,
        )


def _metric_points(message: Any) -> Iterator[MetricPoint]:
    for metric, scope, resource in _scoped(message.resource_metrics, "scope_metrics", "metrics"):
        kind = metric.WhichOneof("data")
        if kind is None or kind == "summary":  # no SDK makes summaries
            continue
        data = getattr(metric, kind)
        temporality = getattr(data, "aggregation_temporality", None)
        for point in data.data_points:
            number = kind in ("gauge", "sum")
            field = point.WhichOneof("value") if number else None
            yield MetricPoint(
                name=metric.name,
                description=metric.description,
                unit=metric.unit,
                kind=kind,
                attributes=_attributes(point.attributes),
                start_ns=point.start_time_unix_nano,
                time_ns=point.time_unix_nano,
                value=None if field is None else getattr(point, field),
                count=None if number else point.count,
                sum=None if number or not point.HasField("sum") else point.sum,
                min=None if number or not point.HasField("min") else point.min,
                max=None if number or not point.HasField("max") else point.max,
                bounds=tuple(getattr(point, "explicit_bounds", ())),
                bucket_counts=tuple(getattr(point, "bucket_counts", ())),
                temporality=None
                if temporality is None
                else _enum_name(
                    metrics_pb2.AggregationTemporality, temporality, "AGGREGATION_TEMPORALITY_"
                ),
                monotonic=getattr(data, "is_monotonic", None),
                scope=scope,
                resource=resource,
            )


def _logs(message: Any) -> Iterator[LogRecord]:
    for record, scope, resource in _scoped(message.resource_logs, "scope_logs", "log_records"):
        yield LogRecord(
            event_name=getattr(record, "event_name", ""),  # older protos have none
            body=_value(record.body),
            severity_number=int(record.severity_number),
            severity_text=record.severity_text,
            attributes=_attributes(record.attributes),
            time_ns=record.time_unix_nano,
            observed_ns=record.observed_time_unix_nano,
            trace_id=record.trace_id.hex() or None,
            span_id=record.span_id.hex() or None,
            scope=scope,
            resource=resource,
        )


_DECODERS: Final[dict[Signal, Callable[[Any], Iterator[Any]]]] = {
    "traces": _spans,
    "metrics": _metric_points,
    "logs": _logs,
}


def decode(signal: Signal, message: Message) -> list[Any]:
    """The `Span`, `MetricPoint` or `LogRecord` items of an `Export*ServiceRequest`."""
    return list(_DECODERS[signal](message))
