# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Where spans hang: a trace for each step, one tree under an application's span."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator

import pytest
from in_memory import Collected
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.instrumentation.tunix import context, semconv
from opentelemetry.instrumentation.tunix.config import Options
from opentelemetry.instrumentation.tunix.telemetry import Telemetry


@pytest.fixture
def handler(collected: Collected) -> Telemetry:
    return Telemetry(Options.load({}), **collected.providers())


@contextlib.contextmanager
def train_step(handler: Telemetry) -> Iterator[None]:
    """What a train step does around its call."""
    span = context.start_step(handler, semconv.MODEL_TRAIN, time.time_ns())
    span.set_attributes(context.identity(handler, context.current_run()))
    with trace.use_span(span, end_on_exit=True):
        yield


def test_each_step_is_a_trace_that_links_to_the_run(
    collected: Collected, handler: Telemetry
) -> None:
    """Steps are roots with one link, and share the run id with the run."""
    with context.run(handler, dict):
        for _ in range(2):
            with train_step(handler):
                pass
    first, second, run = collected.spans()
    assert run.name == semconv.RUN
    assert len({s.context.trace_id for s in (first, second, run)}) == 3
    for step in (first, second):
        assert step.parent is None
        assert [link.context.span_id for link in step.links] == [run.context.span_id]
        assert step.attributes[semconv.RUN_ID] == run.attributes[semconv.RUN_ID]
    assert re.fullmatch("[0-9a-f]{32}", run.attributes[semconv.RUN_ID])


def test_the_run_is_not_current(collected: Collected, handler: Telemetry) -> None:
    """Spans of a data loader inside the run do not pile up in one trace."""
    with context.run(handler, dict):
        assert not trace.get_current_span().get_span_context().is_valid


def test_a_span_inside_a_step_is_its_child(collected: Collected, handler: Telemetry) -> None:
    """An evaluation or a compilation in a step belongs to its trace, without a link."""
    with (
        context.run(handler, dict),
        train_step(handler),
        context.span(handler, semconv.MODEL_EVAL, dict),
    ):
        pass
    inner, step, _ = collected.spans()
    assert inner.parent.span_id == step.context.span_id
    assert inner.links == ()


def test_a_step_is_a_root_under_any_span_of_the_loop(
    collected: Collected, handler: Telemetry
) -> None:
    """A span that a hook left open inside the run does not swallow steps."""
    tracer = collected.tracer_provider.get_tracer("hook")
    with (
        context.run(handler, dict),
        tracer.start_as_current_span("hook"),
        train_step(handler),
    ):
        pass
    assert collected.spans(semconv.MODEL_TRAIN)[0].parent is None


def test_everything_nests_under_the_applications_span(
    collected: Collected, handler: Telemetry
) -> None:
    """One trace: application, run, step; no links."""
    tracer = collected.tracer_provider.get_tracer("application")
    with (
        tracer.start_as_current_span("application"),
        context.run(handler, dict),
        train_step(handler),
    ):
        pass
    step, run, application = collected.spans()
    assert step.parent.span_id == run.context.span_id
    assert run.parent.span_id == application.context.span_id
    assert step.links == run.links == ()


def test_baggage_reaches_the_steps(collected: Collected, handler: Telemetry) -> None:
    """A root drops the parent span and keeps the rest of the context."""
    token = otel_context.attach(baggage.set_baggage("team", "alignment"))
    try:
        with context.run(handler, dict), train_step(handler):
            assert baggage.get_baggage("team") == "alignment"
    finally:
        otel_context.detach(token)


def test_only_the_outermost_run_is_a_span(collected: Collected, handler: Telemetry) -> None:
    """A learner trains its trainers: one run."""
    with context.run(handler, dict), context.run(handler, dict):
        pass
    assert collected.names() == [semconv.RUN]


def test_two_threads_have_two_runs(collected: Collected, handler: Telemetry) -> None:
    """Runs belong to the execution context and do not take each other's steps."""

    def train() -> None:
        with context.run(handler, dict), train_step(handler):
            barrier.wait(10)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    links = {span.links[0].context.span_id for span in collected.spans(semconv.MODEL_TRAIN)}
    assert links == {span.context.span_id for span in collected.spans(semconv.RUN)}
    assert len(links) == 2


def test_run_ids_do_not_repeat_when_the_script_seeds_random(
    collected: Collected, handler: Telemetry
) -> None:
    """Training scripts call random.seed(); two of them are two runs all the same."""
    for _ in range(2):
        random.seed(0)
        with context.run(handler, dict):
            pass
    first, second = collected.spans()
    assert first.attributes[semconv.RUN_ID] != second.attributes[semconv.RUN_ID]


def test_without_a_run_spans_have_no_link_and_no_run_id(
    collected: Collected, handler: Telemetry
) -> None:
    """Code that calls the compiled step itself is traced as well."""
    with train_step(handler):
        pass
    (step,) = collected.spans()
    assert step.links == ()
    assert not step.attributes
