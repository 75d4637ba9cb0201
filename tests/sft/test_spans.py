# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""`span`: nesting, exceptions, and which processes send spans and events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tunix
from tunix.sft import _process
from tunix.sft.metrics_logger import MetricsLogger

Make = Callable[..., MetricsLogger]


def names(spans: InMemorySpanExporter) -> list[str]:
    return [span.name for span in spans.get_finished_spans()]


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


def test_span_is_current_and_records_an_exception(make: Make, spans: InMemorySpanExporter) -> None:
    """The same exception reaches the caller; the span has its event and the status."""
    logger, error = make(), ValueError("no")
    with pytest.raises(ValueError, match="no") as raised, logger.span("s") as span:
        raise error if trace.get_current_span() is span else AssertionError
    assert raised.value is error
    found = only(spans)
    assert found.status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in found.events] == ["exception"]
    scope = found.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("tunix", tunix.__version__)
    assert not trace.get_current_span().get_span_context().is_valid


def test_span_ends_when_the_block_exits_the_process(
    make: Make, spans: InMemorySpanExporter
) -> None:
    """SystemExit, KeyboardInterrupt and GeneratorExit pass on."""
    for error in (SystemExit(0), KeyboardInterrupt(), GeneratorExit()):
        with pytest.raises(type(error)), make().span("s"):
            raise error
    assert names(spans) == ["s"] * 3


def test_spans_nest_and_carry_the_options(make: Make, spans: InMemorySpanExporter) -> None:
    """Attributes of the options are on spans and the call's own win."""
    logger = make(attributes={"team": "a", "shard": 0})
    with logger.span("outer") as outer, logger.span("inner", {"shard": 3}):
        pass
    inner = spans.get_finished_spans()[0]
    assert inner.parent is not None
    assert inner.parent.span_id == outer.get_span_context().span_id
    assert inner.attributes == {"team": "a", "shard": 3}


class BrokenTracerProvider(trace.TracerProvider):
    """Its tracers raise."""

    def get_tracer(self, *args: Any, **kwargs: Any) -> Any:
        class Tracer:
            def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("broken tracer")

        return Tracer()


def test_broken_tracer_does_not_stop_the_block(warnings_of: Callable[[str], list[str]]) -> None:
    """The block runs with a span that records nothing; told once."""
    logger, ran = MetricsLogger(tracer_provider=BrokenTracerProvider()), []
    for _ in range(3):
        with logger.span("s") as span:
            ran.append(span.is_recording())
    assert ran == [False] * 3
    assert len(warnings_of("tunix")) == 1


@pytest.mark.parametrize("bad", ["name", "value"])
def test_what_cannot_be_text_is_told_once(
    make: Make, warnings_of: Callable[[str], list[str]], records: Any, bad: str
) -> None:
    """Neither span nor event raises."""

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    logger, ran = make(), 0
    name: Any = Bad() if bad == "name" else "n"
    for _ in range(2):
        logger.event(name, attributes={"k": Bad()})
        with logger.span(name, {"k": Bad()}):
            ran += 1
    assert ran == 2
    assert len(warnings_of("tunix")) == 1


# Policy ------------------------------------------------------------------------------------------


def test_disabled_logger_sends_nothing(
    make: Make, spans: InMemorySpanExporter, records: list[logging.LogRecord]
) -> None:
    """The block runs with a span that records nothing."""
    logger = make(enabled=False)
    with logger.span("s") as span:
        logger.event("e")
        span.set_attribute("k", 1)
        assert not span.is_recording()
    assert not spans.get_finished_spans()
    assert not records


@pytest.mark.parametrize("everywhere", [False, True])
def test_other_processes_send_only_when_all_do(
    make: Make,
    spans: InMemorySpanExporter,
    records: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    everywhere: bool,
) -> None:
    """Then with their index."""
    monkeypatch.setattr(_process, "process_index", lambda: 1)
    logger = make(emit_on_all_processes=everywhere)
    with logger.span("s"):
        logger.event("e")
    assert names(spans) == ["s"] * everywhere
    assert len(records) == everywhere
    if everywhere:
        assert (only(spans).attributes or {})["tunix.jax.process.index"] == 1
        assert vars(records[0])["tunix.jax.process.index"] == 1


@pytest.mark.parametrize("index", [0, 1])
def test_spans_and_events_wait_for_the_process_index(
    make: Make,
    spans: InMemorySpanExporter,
    records: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    index: int,
) -> None:
    """They go out or are dropped as soon as it is known; the event keeps the span around it."""
    known: list[int | None] = [None]
    monkeypatch.setattr(_process, "process_index", lambda: known[0])
    around: list[Any] = []
    events = logging.getLogger("tunix.events")
    handler = logging.Handler()
    handler.emit = lambda _: around.append(trace.get_current_span())  # type: ignore[method-assign]
    events.addHandler(handler)
    logger = make()
    with logger.span("early") as early:
        logger.event("e")
    assert (names(spans), records) == ([], [])
    known[0] = index
    logger.log("", "loss", 0.5, "train", 1)
    with logger.span("late"):
        pass
    events.removeHandler(handler)
    assert names(spans) == (["early", "late"] if index == 0 else [])
    assert around == ([early] if index == 0 else [])
    if index == 0:
        first = spans.get_finished_spans()[0]
        assert first.end_time is not None
        assert first.end_time <= spans.get_finished_spans()[1].start_time  # type: ignore[operator]


def test_close_ends_neither_spans_nor_events(
    make: Make, spans: InMemorySpanExporter, records: list[logging.LogRecord]
) -> None:
    """`close` is about gauges."""
    logger = make()
    logger.close()
    with logger.span("s"):
        logger.event("e")
    assert names(spans) == ["s"]
    assert len(records) == 1
