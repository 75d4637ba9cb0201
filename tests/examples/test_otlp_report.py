# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The tables that the demo prints."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import otlp_report as report
from otlp_data import LogRecord, MetricPoint, Scope, Span
from otlp_receiver import TelemetryStore

SCOPE = Scope("tunix", "1", "", {})
TRAIN = {"tunix.training.mode": "train"}
EVAL = {"tunix.training.mode": "eval"}


def span(name: str, start: float, end: float, status: str = "UNSET", **attributes: Any) -> Span:
    """A span from `start` to `end` seconds."""
    return Span(
        name=name,
        trace_id="1" * 32,
        span_id="2" * 16,
        parent_id=None,
        kind="INTERNAL",
        start_ns=round(start * 1e9),
        end_ns=round(end * 1e9),
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
        status=status,
        status_description="",
        events=(),
        links=(),
        scope=SCOPE,
        resource={},
    )


def point(name: str, kind: str = "gauge", time: int = 1, start: int = 0, **fields: Any) -> Any:
    """A metric point; `fields` replace the empty ones."""
    empty = dict.fromkeys(("value", "count", "sum", "min", "max", "temporality", "monotonic"))
    defaults = {"unit": "", "attributes": {}, "bounds": (), "bucket_counts": (), "description": ""}
    return MetricPoint(
        **{**empty, **defaults, **fields},
        name=name,
        kind=kind,
        time_ns=time,
        start_ns=start,
        scope=SCOPE,
        resource={},
    )


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without title, header and rule."""
    return [line.split() for line in text.splitlines()[3:]]


def test_spans_are_counted_and_summed_in_order_of_start() -> None:
    spans = [
        span("tunix.model.train", 1, 1.5),
        span("tunix.model.train", 2, 4),
        span("tunix.model.train", 5, 5.25, status="ERROR"),
        span("tunix.run", 0, 130),
    ]
    assert report.span_table(spans).splitlines() == [
        "Spans",
        "  name               count       total      median         max  errors",
        "  -----------------  -----  ----------  ----------  ----------  ------",
        "  tunix.run              1  2 min 10 s  2 min 10 s  2 min 10 s",
        "  tunix.model.train      3      2.75 s      500 ms      2.00 s       1",
    ]


def test_host_only_spans_are_named_under_the_table() -> None:
    host = span("tunix.model.train", 0, 1, tunix__host_only=True)
    device = span("tunix.model.eval", 1, 2, tunix__host_only=False)
    *_, last = report.span_table([host, device]).splitlines()
    assert last.startswith("  tunix.model.train: time on the host only")
    assert "host" not in report.span_table([device])


def test_last_gauge_value_stands_beside_the_step_of_its_own_mode() -> None:
    points = [
        point("tunix.training.loss", time=3, value=0.123456, attributes=TRAIN),
        point("tunix.training.loss", time=2, value=9.0, attributes=TRAIN),
        point("tunix.training.step", time=3, value=20, attributes=TRAIN, unit="{step}"),
        point("tunix.training.loss", time=2, value=0.5, attributes=EVAL),
        point("tunix.training.step", time=2, value=16, attributes=EVAL, unit="{step}"),
        point("host.memory", time=2, value=7, unit="By"),
    ]
    assert rows(report.gauge_table(points)) == [
        ["host.memory", "7", "By"],
        ["tunix.training.loss", "mode=eval", "0.5", "16"],
        ["tunix.training.loss", "mode=train", "0.12346", "20"],
        ["tunix.training.step", "mode=eval", "16"],
        ["tunix.training.step", "mode=train", "20"],
    ]


def test_long_attribute_keys_are_short_and_the_run_id_is_left_out() -> None:
    attributes = {**TRAIN, "tunix.metrics.prefix": "actor", "tunix.run.id": "abc", "other": 1}
    text = report.gauge_table([point("tunix.kl", value=1.0, attributes=attributes)])
    assert rows(text) == [["tunix.kl", "other=1", "prefix=actor", "mode=train", "1"]]


def test_equal_values_of_different_types_are_different_series() -> None:
    points = [point("a", value=1, attributes={"k": value}) for value in (1, True, "1")]
    assert len(rows(report.gauge_table(points))) == 3


def test_cumulative_sums_count_once_and_restarts_and_deltas_add_up() -> None:
    cumulative = [point("c", "sum", time, 0, value=value) for time, value in ((1, 5), (2, 8))]
    restarted = point("c", "sum", 9, 7, value=2)
    deltas = [point("d", "sum", time, time - 1, value=3) for time in (1, 2)]
    assert rows(report.sum_table([*cumulative, restarted, *deltas])) == [["c", "10"], ["d", "6"]]


def test_histograms_show_count_mean_and_maximum_in_their_unit() -> None:
    points = [
        point("t", "histogram", 1, unit="s", count=1, sum=0.1, max=0.1),
        point("t", "histogram", 2, unit="s", count=4, sum=1.0, max=0.4),
        point("x", "exponential_histogram", count=2, sum=3.0, unit="By"),
        point("zero", "histogram", count=0, sum=0.0),
    ]
    assert rows(report.histogram_table(points)) == [
        ["t", "4", "250", "ms", "400", "ms"],
        ["x", "2", "1.5", "By"],
        ["zero", "0"],
    ]


def test_events_are_counted_by_name_and_plain_records_together() -> None:
    def record(event_name: str) -> LogRecord:
        return LogRecord(event_name, None, 9, "INFO", {}, 1, 1, None, None, SCOPE, {})

    text = report.event_table([record("b"), record("a"), record("b"), record("")])
    assert [line.split()[-1] for line in text.splitlines()[3:]] == ["1", "1", "2"]
    assert "(log records without an event name)" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 µs"),
        (1.5e-6, "1.50 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (90_000, "25 h 00 min"),
        (-0.005, "-5.00 ms"),
    ],
)
def test_duration_has_three_digits_and_a_fitting_unit(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2e-05, "1", "2e-05"),
        (123456789, "{token}", "123456789"),
        (1.5, "By", "1.5 By"),
        (float("nan"), "", "nan"),
        (0.25, "s", "250 ms"),
        (None, "s", ""),
    ],
)
def test_quantity_shows_units_that_matter(value: float | None, unit: str, text: str) -> None:
    assert report.quantity(value, unit) == text


def test_report_leaves_empty_tables_out() -> None:
    store = TelemetryStore()
    request = ExportTraceServiceRequest()
    one = request.resource_spans.add().scope_spans.add().spans.add(name="tunix.run")
    one.start_time_unix_nano, one.end_time_unix_nano = 1, 2_000_001
    store.add("traces", request, {})
    assert report.report(store).splitlines() == [
        "Received: requests 1, spans 1, metric points 0, log records 0",
        "",
        "Spans",
        "  name       count    total   median      max",
        "  ---------  -----  -------  -------  -------",
        "  tunix.run      1  2.00 ms  2.00 ms  2.00 ms",
    ]
