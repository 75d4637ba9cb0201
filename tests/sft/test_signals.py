# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Values and keys of `event` and `span`, and the record that an event is."""

from __future__ import annotations

import decimal
import enum
import logging
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from value_cases import VALUE_CASES, ValueCase, same

from tunix.sft.metrics_logger import MetricsLogger

Make = Callable[..., MetricsLogger]


def names(spans: InMemorySpanExporter) -> list[str]:
    return [span.name for span in spans.get_finished_spans()]


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


class Colour(enum.Enum):
    RED = 2.5


VALUES = [
    (2.5, 2.5),
    (-0.0, -0.0),
    (math.nan, math.nan),
    (math.inf, math.inf),
    (3, 3),
    (True, True),
    (np.float32(2.5), 2.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (ml_dtypes.bfloat16(2.5), 2.5),
    (decimal.Decimal("2.5"), 2.5),
    (np.array([2.5]), [2.5]),
    (np.array(3), 3),
    (jnp.float32(2.5), 2.5),
    (jnp.asarray(3), 3),
    (2**63 - 1, 2**63 - 1),
    (2**63, str(2**63)),
    (2**70, str(2**70)),
    (2**70 + 1, str(2**70 + 1)),
    (10**400, str(10**400)),
    (np.uint64(2**64 - 1), str(2**64 - 1)),
    ("text", "text"),
    ("\ud800", "\\ud800"),
    (b"\xff", "\\xff"),
    (Colour.RED, 2.5),
    (1 + 2j, "(1+2j)"),
]


@pytest.mark.parametrize(("value", "plain"), VALUES, ids=lambda value: repr(value)[:20])
def test_attribute_keeps_type_and_value(
    make: Make,
    spans: InMemorySpanExporter,
    records: list[logging.LogRecord],
    value: Any,
    plain: Any,
) -> None:
    """On spans and events alike; what OTLP cannot hold is text."""
    logger = make()
    with logger.span("s", {"k": value}):
        logger.event("e", attributes={"k": value})
    on_span = (only(spans).attributes or {})["k"]
    on_event = vars(records[0])["k"]
    assert same(list(on_span) if isinstance(on_span, tuple) else on_span, plain)
    assert same(on_event, plain)
    if not isinstance(plain, list):
        assert type(on_span) is type(on_event) is type(plain)


@pytest.mark.parametrize(("value", "plain"), VALUES, ids=lambda value: repr(value)[:20])
def test_body_keeps_type_and_value(
    make: Make, records: list[logging.LogRecord], value: Any, plain: Any
) -> None:
    """Also inside a map and a list."""
    make().event("e", {"a": value, "b": [value, None], "c": None})
    (body,) = [record.msg for record in records]
    plain = plain[0] if isinstance(plain, list) else plain
    assert set(body) == {"a", "b"}
    assert same(body["a"], plain)
    assert same(body["b"][0], plain)
    assert body["b"][1] == "None"


@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_any_value_is_an_attribute_and_a_body(
    make: Make,
    spans: InMemorySpanExporter,
    records: list[logging.LogRecord],
    warnings_of: Callable[[str], list[str]],
    case: ValueCase,
) -> None:
    """No exception, no warning, no event lost."""
    logger = make()
    with logger.span("s", {"k": case.make(), "list": [case.make(), case.make()]}):
        logger.event("e", case.make(), {"k": case.make()})
    assert only(spans).name == "s"
    (record,) = records
    assert record.getMessage() == str(record.msg)
    assert not warnings_of("tunix.sft")
    assert not warnings_of("opentelemetry")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ([1, 2], [1, 2]),
        ((1, 2.5), ["1", "2.5"]),
        ([None, None], ["None", "None"]),
        (["a", None], ["a", "None"]),
        ([], []),
        (np.array([1, 2]), [1, 2]),
        ({"a": 1, 2: None}, "{'a': 1, '2': None}"),
        (np.ones((2, 2)), "[[1. 1.]\n [1. 1.]]"),
    ],
)
def test_list_attribute_is_of_one_type(
    make: Make, records: list[logging.LogRecord], value: Any, plain: Any
) -> None:
    """Lists of one plain type stay, any other becomes text item by item."""
    make().event("e", attributes={"k": value})
    assert vars(records[0])["k"] == plain


def test_attribute_that_is_none_is_absent(
    make: Make, spans: InMemorySpanExporter, records: list[logging.LogRecord]
) -> None:
    """OTLP has no null."""
    logger = make()
    with logger.span("s", {"k": None, "l": 1}):
        logger.event("e", attributes={"k": None, "l": 1})
    assert dict(only(spans).attributes or {}) == {"l": 1}
    assert "k" not in vars(records[0])


FIELDS = sorted({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


@pytest.mark.parametrize("key", [*FIELDS, "getMessage", "event.name", "otel.event.name"])
def test_key_of_a_log_record_gets_an_underscore(
    make: Make, records: list[logging.LogRecord], key: str
) -> None:
    """Fields, methods and what names the event stay as they are."""
    make().event("e", "body", {key: "v"})
    (record,) = records
    found = vars(record)
    assert (found[f"{key}_"], found["event.name"], record.getMessage()) == ("v", "e", "body")
    assert found.get(key) != "v"


@pytest.mark.parametrize("key", ["a.b.c", "奖励", "with space", "self", "x" * 300])
def test_other_keys_stay(make: Make, records: list[logging.LogRecord], key: str) -> None:
    """Whatever they look like."""
    make().event("e", attributes={key: "v"})
    assert vars(records[0])[key] == "v"


def test_empty_key_is_renamed(make: Make, records: list[logging.LogRecord]) -> None:
    """The SDK would drop or report it at each event."""
    make().event("e", attributes={"": "v"})
    assert vars(records[0])["_"] == "v"
    assert "" not in vars(records[0])


def test_key_that_a_later_record_factory_takes_is_renamed(
    make: Make, records: list[logging.LogRecord]
) -> None:
    """Instrumenting `logging` after the import takes further keys; the event is not lost."""
    logger, before = make(), logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        vars(record)["otelTraceID"] = "0"
        return record

    logging.setLogRecordFactory(factory)
    try:
        logger.event("e", attributes={"otelTraceID": "v"})
    finally:
        logging.setLogRecordFactory(before)
    found = vars(records[0])
    assert (found["otelTraceID"], found["otelTraceID_"]) == ("0", "v")


def test_event_is_a_record_of_the_caller(make: Make, records: list[logging.LogRecord]) -> None:
    """Name, body, level and source line; the name is the body where there is none."""
    logger = make()
    logger.event("data.loaded")
    logger.event("data.loaded", "100 % of %s", {"n": 1}, logging.WARNING)
    logger.event("data.loaded", severity="error")  # type: ignore[arg-type]
    logger.event("dropped", severity=logging.DEBUG)
    assert [record.getMessage() for record in records] == [
        "data.loaded",
        "100 % of %s",
        "data.loaded",
    ]
    levels = [record.levelno for record in records]
    assert levels == [logging.INFO, logging.WARNING, logging.ERROR]
    assert {vars(record)["event.name"] for record in records} == {"data.loaded"}
    assert {record.filename for record in records} == {"test_signals.py"}
    assert records[0].funcName == "test_event_is_a_record_of_the_caller"


def test_levels_are_the_applications(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """INFO of a library is dropped unless somebody lets it through; no handler is added."""
    events = logging.getLogger("tunix.events")
    make().event("e")
    assert not caplog.records
    assert (events.level, events.handlers, events.propagate) == (logging.NOTSET, [], True)
