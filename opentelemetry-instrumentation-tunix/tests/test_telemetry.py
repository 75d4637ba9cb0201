# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""How a call ends is told by its span; a failure of telemetry stays telemetry's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from typing import Any

import pytest
from in_memory import Collected
from opentelemetry.instrumentation.tunix import context, semconv, telemetry
from opentelemetry.instrumentation.tunix.config import Options
from opentelemetry.instrumentation.tunix.telemetry import Telemetry
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import StatusCode, get_current_span


def run_block(collected: Collected, error: BaseException | None) -> BaseException | None:
    """Runs a block under a span and returns what came out of it."""
    try:
        with context.span(
            Telemetry(Options.load({}), **collected.providers()), semconv.MODEL_EVAL, dict
        ):
            if error is not None:
                raise error
    except BaseException as caught:
        return caught
    return None


class OwnError(Exception):
    """An exception with a module."""


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (ValueError("bad"), "ValueError"),
        (OwnError("bad"), f"{OwnError.__module__}.OwnError"),
        (SystemExit(3), "SystemExit"),
    ],
)
def test_a_failure_is_an_error_with_its_type(
    collected: Collected, error: BaseException, error_type: str
) -> None:
    """Status ERROR, the message as description, the qualified class name as error.type."""
    assert run_block(collected, error) is error
    (span,) = collected.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == str(error)
    assert span.attributes[semconv.ERROR_TYPE] == error_type
    assert semconv.INTERRUPTED not in span.attributes


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        GeneratorExit(),
        SystemExit(0),
        SystemExit(),
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
    ],
)
def test_an_interrupt_is_marked_and_no_error(collected: Collected, error: BaseException) -> None:
    """Ctrl-C, a clean exit and a cancellation are not failures of the call."""
    assert run_block(collected, error) is error
    (span,) = collected.spans()
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes[semconv.INTERRUPTED] == type(error).__qualname__
    assert semconv.ERROR_TYPE not in span.attributes
    assert collected.events() == []


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration()])
def test_end_of_data_is_normal(collected: Collected, error: BaseException) -> None:
    """Data that ends leaves a span as a call that returned does."""
    assert run_block(collected, error) is error
    (span,) = collected.spans()
    assert span.status.status_code is StatusCode.UNSET
    assert not span.attributes


def test_an_exception_is_logged_once_where_it_began(collected: Collected) -> None:
    """It passes several spans and is one log record, tied to the innermost."""
    handler = Telemetry(Options.load({}), **collected.providers())
    error = ValueError("bad")
    with (
        pytest.raises(ValueError, match="bad"),
        context.span(handler, semconv.MODEL_TRAIN, dict),
        context.span(handler, semconv.MODEL_EVAL, dict),
    ):
        raise error
    inner, outer = collected.spans()
    (record,) = collected.events()
    assert record.event_name == semconv.EXCEPTION
    assert record.span_id == inner.context.span_id
    assert record.attributes["exception.type"] == "ValueError"
    assert record.attributes["exception.message"] == "bad"
    assert {s.status.status_code for s in (inner, outer)} == {StatusCode.ERROR}


def test_two_failures_are_two_events(collected: Collected) -> None:
    """Also where the second exception lies at the address of the first."""
    handler = Telemetry(Options.load({}), **collected.providers())
    for _ in range(50):
        with pytest.raises(ValueError, match="bad"), context.span(handler, "tunix.run", dict):
            raise ValueError("bad")
    assert len(collected.events(semconv.EXCEPTION)) == 50


def test_a_message_may_stay_behind(collected: Collected) -> None:
    """Out of a reward function it may quote a prompt: then only the type leaves."""
    handler = Telemetry(Options.load({}), **collected.providers())
    with (
        pytest.raises(ValueError, match="SECRET"),
        context.run(handler, dict, message=False),
    ):
        raise ValueError("SECRET prompt")
    (span,) = collected.spans()
    assert span.attributes[semconv.ERROR_TYPE] == "ValueError"
    (event,) = collected.events(semconv.EXCEPTION)
    assert event.attributes["exception.type"] == "ValueError"
    assert "SECRET" not in f"{span.to_json()}{dict(event.attributes)}{event.body}"


@pytest.mark.parametrize("text", ["data\udcff.bin", "x" * 100_000])
def test_any_message_can_be_encoded(collected: Collected, text: str) -> None:
    """One that is no valid UTF-8 would make the encoder lose the whole batch."""
    run_block(collected, OwnError(text))
    (span,) = collected.spans()
    assert len(span.status.description.encode("utf-8")) <= 4096


def test_an_exception_without_a_text_is_an_error_all_the_same(collected: Collected) -> None:
    """Its __str__ raises."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    run_block(collected, MuteError())
    (span,) = collected.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "MuteError" in span.status.description


def test_the_span_is_current_inside_and_not_afterwards(collected: Collected) -> None:
    """Spans of the application nest under ours."""
    before = get_current_span()
    with context.span(
        Telemetry(Options.load({}), **collected.providers()), semconv.MODEL_EVAL, dict
    ) as span:
        assert get_current_span() is span
    assert get_current_span() is before


def test_suppression_silences(collected: Collected) -> None:
    """The context flag that other instrumentations heed counts here too."""
    telemetry.activate(Telemetry(Options.load({}), **collected.providers()))
    try:
        assert telemetry.active() is not None
        with suppress_instrumentation():
            assert telemetry.active() is None
    finally:
        telemetry.activate(None)


class BrokenProcessor(SpanProcessor):
    """A span processor that fails where it is told to."""

    def __init__(self, method: str) -> None:
        self.method = method

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.method == "on_start":
            raise RuntimeError("processor")

    def on_end(self, span: Any) -> None:
        if self.method == "on_end":
            raise RuntimeError("processor")


@pytest.mark.parametrize("method", ["on_start", "on_end"])
def test_a_broken_span_processor_does_not_reach_the_run(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its exception is logged once and the block runs; the current span is what it was."""
    provider = TracerProvider()
    provider.add_span_processor(BrokenProcessor(method))
    handler = Telemetry(Options.load({}), tracer_provider=provider)
    before = get_current_span()
    done = 0
    for _ in range(3):
        with context.span(handler, semconv.MODEL_EVAL, dict):
            done += 1
    assert done == 3
    assert get_current_span() is before
    ours = [r for r in caplog.records if r.name == "opentelemetry.instrumentation.tunix"]
    assert [r.levelno for r in ours] == [logging.WARNING]


def test_without_a_provider_nothing_happens() -> None:
    """The API's no-op spans pass through."""
    with context.span(Telemetry(Options.load({})), semconv.MODEL_EVAL, dict) as span:
        assert span is not None
        assert not span.is_recording()
