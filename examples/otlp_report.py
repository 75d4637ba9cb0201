# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of what an OTLP receiver got: spans by name, last values of metrics, events by name."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otlp_data import LogRecord, MetricPoint, Span
    from otlp_receiver import TelemetryStore

_STEP: Final = "tunix.training.step"
_HOST_ONLY: Final = "tunix.host_only"
# The gauges of one mode and prefix belong to one training loop and share its step gauge.
_MODE: Final = "tunix.training.mode"
_PREFIX: Final = "tunix.metrics.prefix"
_SHORT_KEYS: Final = {_MODE: "mode", _PREFIX: "prefix", "tunix.metrics.name": "key"}
_SAME_FOR_ALL: Final = {"tunix.run.id", "rl.run.id"}


def report(store: TelemetryStore) -> str:
    """Everything in `store` as text; tables without rows are left out."""
    spans, points, logs = store.spans, store.metric_points, store.logs
    sections = [
        f"Received: requests {len(store.requests)}, spans {len(spans)}, "
        f"metric points {len(points)}, log records {len(logs)}",
        span_table(spans),
        gauge_table(points),
        sum_table(points),
        histogram_table(points),
        event_table(logs),
    ]
    return "\n\n".join(section for section in sections if section)


def span_table(spans: Iterable[Span]) -> str:
    """Spans by name, in order of their first start."""
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        by_name[span.name].append(span)
    rows: list[list[str]] = []
    host_only: list[str] = []
    for name, group in by_name.items():
        seconds = [span.seconds for span in group]
        numbers = (sum(seconds), statistics.median(seconds), max(seconds))
        errors = sum(span.status == "ERROR" for span in group)
        rows.append([name, str(len(group)), *map(duration, numbers), str(errors or "")])
        if any(span.attributes.get(_HOST_ONLY) is True for span in group):
            host_only.append(name)
    text = table("Spans", ["name", "count", "total", "median", "max", "errors"], rows)
    if host_only:
        text += (
            f"\n  {', '.join(host_only)}: time on the host only, until the call returned; "
            "the device may have worked on."
        )
    return text


def gauge_table(points: Iterable[MetricPoint]) -> str:
    """The last value of every gauge, with the last step of the same training loop."""
    last = _last_by_series(point for point in points if point.kind == "gauge")
    steps = {_loop(point): point.value for point in last if point.name == _STEP}
    rows = [
        [
            point.name,
            _attributes(point),
            quantity(point.value, point.unit),
            "" if point.name == _STEP else str(steps.get(_loop(point), "")),
        ]
        for point in last
    ]
    return table("Gauges, last value", ["name", "attributes", "value", "last step"], rows)


def sum_table(points: Iterable[MetricPoint]) -> str:
    """The total of every sum."""
    rows = [
        [group[0].name, _attributes(group[0]), quantity(_total(group, "value"), group[0].unit)]
        for group in _streams(point for point in points if point.kind == "sum")
    ]
    return table("Sums", ["name", "attributes", "value"], rows)


def histogram_table(points: Iterable[MetricPoint]) -> str:
    """Count, mean and maximum of every histogram, explicit or exponential."""
    rows: list[list[str]] = []
    for group in _streams(point for point in points if point.kind.endswith("histogram")):
        first, count = group[0], _total(group, "count")
        mean = _total(group, "sum") / count if count else None
        largest = max((point.max for point in group if point.max is not None), default=None)
        rows.append(
            [
                first.name,
                _attributes(first),
                str(count),
                quantity(mean, first.unit),
                quantity(largest, first.unit),
            ]
        )
    return table("Histograms", ["name", "attributes", "count", "mean", "max"], rows)


def event_table(logs: Iterable[LogRecord]) -> str:
    """Events by name; plain log records are one row."""
    counts = Counter(record.event_name or "(log records without an event name)" for record in logs)
    rows = [[name, str(count)] for name, count in sorted(counts.items())]
    return table("Events", ["name", "count"], rows)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns; empty ones are left out, and without rows there is no text at all.

    The columns `name` and `attributes` are flush left, all others hold numbers and are flush right.
    """
    if not rows:
        return ""
    columns = [
        column for column in zip(header, *rows, strict=True) if any(cell for cell in column[1:])
    ]
    widths = [max(map(len, column)) for column in columns]
    left = [column[0] in ("name", "attributes") for column in columns]
    lines = [
        "  ".join(
            cell.ljust(width) if flush_left else cell.rjust(width)
            for cell, width, flush_left in zip(cells, widths, left, strict=True)
        ).rstrip()
        for cells in zip(*columns, strict=True)
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, f"  {lines[0]}", f"  {rule}", *(f"  {line}" for line in lines[1:])])


def duration(seconds: float) -> str:
    """Three significant digits and a unit from µs to h."""
    # The limits lie where rounding to three digits would reach the next unit.
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1, "s")):
        if abs(seconds) < limit:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def quantity(value: float | None, unit: str) -> str:
    """A value with its UCUM unit; seconds as `duration`, dimensionless ones and counts bare."""
    if value is None:
        return ""
    if unit == "s":
        return duration(value)
    number = str(value) if isinstance(value, int) else f"{value:.5g}"
    return number if unit in ("", "1") or unit.startswith("{") else f"{number} {unit}"


def _series(point: MetricPoint) -> tuple[str, ...]:
    attributes = sorted(f"{key}={value!r}" for key, value in point.attributes.items())
    return point.name, point.scope.name, *attributes


def _last_by_series(points: Iterable[MetricPoint]) -> list[MetricPoint]:
    ordered = sorted(points, key=lambda point: point.time_ns)
    last = {_series(point): point for point in ordered}
    return [last[key] for key in sorted(last)]


def _streams(points: Iterable[MetricPoint]) -> list[list[MetricPoint]]:
    """The points of each series whose values add up to its total.

    Cumulative points of one process share their start time and the last one counts; a restarted
    process and each delta point have a start time of their own. So: the last of every start time.
    """
    last: defaultdict[tuple[str, ...], dict[int, MetricPoint]] = defaultdict(dict)
    for point in sorted(points, key=lambda point: point.time_ns):
        last[_series(point)][point.start_ns] = point
    return [list(last[key].values()) for key in sorted(last)]


def _total(points: Iterable[MetricPoint], field: str) -> Any:
    return sum(getattr(point, field) or 0 for point in points)


def _loop(point: MetricPoint) -> tuple[Any, Any]:
    return point.attributes.get(_MODE), point.attributes.get(_PREFIX)


def _attributes(point: MetricPoint) -> str:
    return " ".join(
        f"{_SHORT_KEYS.get(key, key)}={value}"
        for key, value in sorted(point.attributes.items())
        if key not in _SAME_FOR_ALL
    )
