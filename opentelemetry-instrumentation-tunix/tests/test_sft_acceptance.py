# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""A whole supervised run, as a reader of its telemetry sees it: every span, attribute and number.

It runs on each supported release: what differs between them is in the library's own log, with
which the events are compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import toy_sft
from in_memory import Collected
from opentelemetry.instrumentation.tunix import library, semconv
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

UPDATES, ACCUMULATION, EVERY = 10, 4, 2
BATCHES = UPDATES * ACCUMULATION

# What stands on each span of a run that succeeds, with the exact Python types; nothing else does.
_FACTS = {
    semconv.RUN_ID: str,
    semconv.JAX_VERSION: str,
    semconv.LIBRARY_NAME: str,
    semconv.LIBRARY_VERSION: str,
    semconv.RUN_MODEL: str,
    semconv.RUN_PARAMETERS: int,
    semconv.RUN_TRAINABLE: int,
    semconv.RUN_ADAPTATION: str,
    semconv.RUN_DEVICE_KIND: str,
    semconv.RUN_DEVICE_COUNT: int,
    semconv.RUN_MAX_STEPS: int,
    semconv.RUN_ACCUMULATION: int,
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    semconv.RUN: {**_FACTS, semconv.RUN_BATCH_SHAPE: tuple[int, int]},
    semconv.MODEL_TRAIN: {
        semconv.RUN_ID: str,
        semconv.ROLE: str,
        semconv.TRAINING_STEP: int,
        semconv.TRAINING_MICRO_STEP: int,
        semconv.HOST_ONLY: bool,
        semconv.DISPATCH_DURATION: float,
        semconv.QUEUE_DURATION: float,
        semconv.DEVICE_DURATION: float,
    },
    semconv.MODEL_EVAL: {
        semconv.RUN_ID: str,
        semconv.TRAINING_STEP: int,
        semconv.HOST_ONLY: bool,
        semconv.DEVICE_DURATION: float,
    },
    semconv.CHECKPOINT_SAVE: {semconv.RUN_ID: str, semconv.TRAINING_STEP: int},
    semconv.RUN_START: _FACTS,
    semconv.STEP_COMPLETED: {
        semconv.RUN_ID: str,
        semconv.TRAINING_STEP: int,
        semconv.TRAINING_MODE: str,
    },
}
GAUGES = {
    "loss": semconv.TRAINING_LOSS,
    "perplexity": semconv.TRAINING_PERPLEXITY,
    "learning_rate": semconv.TRAINING_LEARNING_RATE,
    "grad_norm": semconv.TRAINING_GRADIENT_NORM,
}


def types_of(attributes: Any) -> dict[str, Any]:
    """Exact types by key; of a sequence those of its items too."""
    return {
        key: tuple[tuple(type(item) for item in value)] if type(value) is tuple else type(value)
        for key, value in attributes.items()
    }


def recorded_run(**options: Any) -> tuple[toy_sft.Run, list[tuple[str, str, int, float]]]:
    """A run, and the list of what its trainer hands its logger: name, mode, step, value."""
    from tunix.sft import metrics_logger

    logged: list[tuple[str, str, int, float]] = []

    class Recorder(metrics_logger.MetricsLogger):
        def log(self, prefix: Any, name: Any, value: Any, mode: Any, step: Any) -> None:
            logged.append((name, str(mode), int(step), float(value)))
            super().log(prefix, name, value, mode, step)

    run = toy_sft.Run(**options)
    run.trainer.metrics_logger = Recorder()
    return run, logged


def steps_of(logged: list[tuple[str, str, int, float]]) -> dict[tuple[str, int], dict[str, float]]:
    """What was logged by mode and step, under the names of the gauges."""
    steps: dict[tuple[str, int], dict[str, float]] = {}
    for name, mode, step, value in logged:
        steps.setdefault((mode, step), {})[GAUGES.get(name, f"tunix.{name}")] = value
    return steps


def train_ten_updates(folder: Any) -> tuple[toy_sft.Run, list[tuple[str, str, int, float]]]:
    run, logged = recorded_run(
        updates=UPDATES,
        accumulation=ACCUMULATION,
        eval_every=EVERY,
        checkpoints=str(folder),
        save_every=EVERY,
    )
    run.train(toy_sft.batches(BATCHES), toy_sft.eval_batches())
    return run, logged


def assert_spans_are_complete(spans: list[ReadableSpan]) -> ReadableSpan:
    """Counts, order, numbers, types and status of all spans; returns the run's."""
    # An evaluation at entry; Orbax saves the first step it is asked for.
    evaluations = [0, *range(EVERY, UPDATES + 1, EVERY)]
    saves = [1, *range(EVERY, UPDATES + 1, EVERY)]
    assert Counter(span.name for span in spans) == {
        semconv.RUN: 1,
        semconv.MODEL_TRAIN: BATCHES,
        semconv.MODEL_EVAL: len(evaluations),
        semconv.CHECKPOINT_SAVE: len(saves),
    }
    assert [
        (s.attributes[semconv.TRAINING_STEP], s.attributes[semconv.TRAINING_MICRO_STEP])
        for s in spans
        if s.name == semconv.MODEL_TRAIN
    ] == [(u + 1, m + 1) for u in range(UPDATES) for m in range(ACCUMULATION)]
    for name, steps in ((semconv.MODEL_EVAL, evaluations), (semconv.CHECKPOINT_SAVE, saves)):
        found = [s.attributes[semconv.TRAINING_STEP] for s in spans if s.name == name]
        assert found == steps
    for span in spans:
        assert types_of(span.attributes) == ATTRIBUTES[span.name]
        assert span.status.status_code is StatusCode.UNSET
        assert span.kind is SpanKind.INTERNAL
        assert span.instrumentation_scope.name == semconv.SCOPE
        assert span.instrumentation_scope.schema_url == semconv.SCHEMA_URL
        assert (span.events, span.status.description) == ((), None)
    (run_span,) = [span for span in spans if span.name == semconv.RUN]
    for span in spans:
        assert run_span.start_time <= span.start_time <= span.end_time <= run_span.end_time
    return run_span


def assert_run_is_described(collected: Collected, run: toy_sft.Run, run_span: Any) -> None:
    """The run's facts are right, and its first event has them while it lasts."""
    found = library.detect()
    parameters = sum(array.size for array in run.parameters())
    expected = {
        semconv.JAX_VERSION: jax.__version__,
        semconv.LIBRARY_NAME: "google-tunix",
        semconv.LIBRARY_VERSION: found.version,
        semconv.RUN_MODEL: "ToyTransformer",
        semconv.RUN_PARAMETERS: parameters,
        semconv.RUN_TRAINABLE: parameters,
        semconv.RUN_ADAPTATION: "full",
        semconv.RUN_DEVICE_KIND: jax.devices()[0].device_kind,
        semconv.RUN_DEVICE_COUNT: 1,
        semconv.RUN_MAX_STEPS: UPDATES,
        semconv.RUN_ACCUMULATION: ACCUMULATION,
        semconv.RUN_ID: run_span.attributes[semconv.RUN_ID],
    }
    (start,) = collected.events(semconv.RUN_START)
    assert dict(start.attributes) == expected
    assert start.span_id == run_span.context.span_id
    expected[semconv.RUN_BATCH_SHAPE] = (toy_sft.BATCH, toy_sft.LENGTH)
    assert dict(run_span.attributes) == expected


def assert_events_are_the_librarys_log(
    collected: Collected, logged: list[tuple[str, str, int, float]], run: toy_sft.Run
) -> None:
    """One event a step and mode, in order, with the very numbers of the library's history."""
    logger = run.trainer.metrics_logger
    for mode in ("train", "eval"):
        for name in {name for name, of, _, _ in logged if of == mode}:
            history = [float(value) for value in logger.get_metric_history("", name, mode)]
            assert history == [value for n, m, _, value in logged if (n, m) == (name, mode)]
    expected = steps_of(logged)
    assert [step for mode, step in expected if mode == "eval"] == list(range(0, UPDATES + 1, EVERY))
    completed = [
        step
        for (mode, step), values in expected.items()
        if mode == "train" and semconv.TRAINING_LOSS in values
    ]
    assert completed == list(range(1, UPDATES + 1))
    for mode in ("train", "eval"):
        events = [
            event
            for event in collected.events(semconv.STEP_COMPLETED)
            if event.attributes[semconv.TRAINING_MODE] == mode
        ]
        assert [
            (event.attributes[semconv.TRAINING_STEP], dict(event.body)) for event in events
        ] == [(step, values) for (of, step), values in expected.items() if of == mode]
        assert {type(value) for event in events for value in event.body.values()} == {float}
    for event in collected.events():
        assert types_of(event.attributes) == ATTRIBUTES[event.event_name]


def test_each_micro_step_is_a_trace_linked_to_the_run_and_every_number_arrives(
    instrumented: Collected, tmp_path: Any
) -> None:
    """Ten updates of four micro-batches, without a span of the application."""
    run, logged = train_ten_updates(tmp_path)
    spans = instrumented.spans()
    run_span = assert_spans_are_complete(spans)
    assert_run_is_described(instrumented, run, run_span)
    assert_events_are_the_librarys_log(instrumented, logged, run)
    assert len({span.context.trace_id for span in spans}) == len(spans)
    assert {span.parent for span in spans} == {None}
    for span in spans:
        links = [] if span is run_span else [run_span.context]
        assert [link.context for link in span.links] == links
        assert span.attributes[semconv.RUN_ID] == run_span.attributes[semconv.RUN_ID]


def test_under_an_applications_span_the_whole_run_is_one_trace(
    instrumented: Collected, tmp_path: Any
) -> None:
    """The run hangs below it, everything else below the run, and nothing has a link."""
    tracer = instrumented.tracer_provider.get_tracer("application")
    with tracer.start_as_current_span("job") as job:
        run, logged = train_ten_updates(tmp_path)
    (job_span,) = instrumented.spans("job")
    assert job_span.attributes == {}
    ours = [span for span in instrumented.spans() if span.name != "job"]
    run_span = assert_spans_are_complete(ours)
    assert_run_is_described(instrumented, run, run_span)
    assert_events_are_the_librarys_log(instrumented, logged, run)
    assert {span.context.trace_id for span in ours} == {job.get_span_context().trace_id}
    for span in ours:
        above = job_span if span is run_span else run_span
        assert span.parent.span_id == above.context.span_id
        assert span.links == ()


def test_a_run_resumed_at_update_5_of_8_tells_of_updates_6_to_8_once_each(
    instrumented: Collected, tmp_path: Any
) -> None:
    """No span, no event and no number for the batches that the library skips."""
    options = {"accumulation": 2, "checkpoints": str(tmp_path)}
    first, _ = recorded_run(updates=5, **options)
    first.train(toy_sft.batches(16))
    (run_span,) = instrumented.spans(semconv.RUN)
    assert semconv.RUN_RESUMED_FROM not in run_span.attributes
    instrumented.clear()

    run, logged = recorded_run(updates=8, **options)
    run.train(toy_sft.batches(16))
    (run_span,) = instrumented.spans(semconv.RUN)
    (start,) = instrumented.events(semconv.RUN_START)
    for attributes in (run_span.attributes, start.attributes):
        assert attributes[semconv.RUN_RESUMED_FROM] == 5
        assert type(attributes[semconv.RUN_RESUMED_FROM]) is int
    assert [
        (s.attributes[semconv.TRAINING_STEP], s.attributes[semconv.TRAINING_MICRO_STEP])
        for s in instrumented.spans(semconv.MODEL_TRAIN)
    ] == [(update, micro) for update in (6, 7, 8) for micro in (1, 2)]
    events = instrumented.events(semconv.STEP_COMPLETED)
    assert [(e.attributes[semconv.TRAINING_STEP], dict(e.body)) for e in events] == [
        (step, values) for (_, step), values in steps_of(logged).items()
    ]
    with_loss = [
        e.attributes[semconv.TRAINING_STEP] for e in events if semconv.TRAINING_LOSS in e.body
    ]
    assert with_loss == [6, 7, 8]
    saves = [
        s.attributes[semconv.TRAINING_STEP] for s in instrumented.spans("tunix.checkpoint.save")
    ]
    assert saves == [6, 7, 8]


def test_numbers_of_numpy_in_a_configuration_reach_no_attribute(
    instrumented: Collected, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """They become int, what is not set is left out, and the SDK has nothing to complain of."""
    run = toy_sft.Run(updates=np.int64(2), accumulation=2, checkpoints=str(tmp_path))
    run.trainer.config.gradient_accumulation_steps = np.int32(2)
    run.trainer._train_steps = np.int64(0)
    run.train(toy_sft.batches(4))
    expected = dict(ATTRIBUTES[semconv.RUN])
    (run_span,) = instrumented.spans(semconv.RUN)
    assert types_of(run_span.attributes) == expected
    for span in instrumented.spans(semconv.MODEL_TRAIN):
        assert types_of(span.attributes) == ATTRIBUTES[semconv.MODEL_TRAIN]
    instrumented.clear()
    toy_sft.Run(updates=None).train(toy_sft.batches(2))
    (run_span,) = instrumented.spans(semconv.RUN)
    del expected[semconv.RUN_MAX_STEPS]
    assert types_of(run_span.attributes) == expected
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []
