# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the installed Tunix logs arrives as gauges and step events, and nothing else changes."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_sft
from in_memory import Collected
from opentelemetry.instrumentation.tunix import (
    TunixInstrumentor,
    _process,
    context,
    library,
    metrics,
    semconv,
    telemetry,
)
from opentelemetry.sdk._logs import LogRecordProcessor

TRAIN = frozenset({(semconv.TRAINING_MODE, "train")})


@pytest.fixture
def logger(instrumented: Collected) -> Iterator[Any]:
    from tunix.sft import metrics_logger

    jax.devices()  # a backend exists, as in any training
    logger = metrics_logger.MetricsLogger()
    yield logger
    logger.close()


def test_a_run_gives_the_five_gauges(instrumented: Collected) -> None:
    """Loss, perplexity, learning rate, gradient norm and step, with the values of the last step."""
    run = toy_sft.Run(updates=3)
    run.train(toy_sft.batches(10))
    gauges = instrumented.gauges()
    assert gauges[semconv.TRAINING_LOSS, TRAIN] == run.losses[-1]
    assert gauges[semconv.TRAINING_PERPLEXITY, TRAIN] == pytest.approx(math.exp(run.losses[-1]))
    assert gauges[semconv.TRAINING_LEARNING_RATE, TRAIN] == pytest.approx(1e-3)
    assert gauges[semconv.TRAINING_STEP_GAUGE, TRAIN] == 3
    if library.detect().version not in ("0.1.4", "0.1.5"):  # which log no gradient norm
        assert gauges[semconv.TRAINING_GRADIENT_NORM, TRAIN] > 0


def test_gauges_carry_the_librarys_scope_and_version(instrumented: Collected, logger: Any) -> None:
    """A dashboard made for the scope tunix works here."""
    logger.log("", "loss", 1.0, "train", 1)
    (scope,) = instrumented.metric_scopes()
    assert (scope.name, scope.version) == (semconv.GAUGE_SCOPE, library.detect().version)


def test_each_update_is_an_event_with_all_its_numbers(instrumented: Collected) -> None:
    """As many events as updates, in order, the last one too; values as the library logged them."""
    run = toy_sft.Run(updates=5, accumulation=2, eval_every=2)
    run.train(toy_sft.batches(100), toy_sft.eval_batches())
    events = instrumented.events(semconv.STEP_COMPLETED)
    train = [e for e in events if e.attributes[semconv.TRAINING_MODE] == "train"]
    assert [
        e.attributes[semconv.TRAINING_STEP]
        for e in train
        if e.attributes[semconv.TRAINING_STEP] > 0
    ] == [1, 2, 3, 4, 5]
    losses = [e.body[semconv.TRAINING_LOSS] for e in train if semconv.TRAINING_LOSS in e.body]
    assert losses == run.losses
    evals = [e for e in events if e.attributes[semconv.TRAINING_MODE] == "eval"]
    assert [e.attributes[semconv.TRAINING_STEP] for e in evals] == [0, 2, 4]
    (run_span,) = instrumented.spans(semconv.RUN)
    run_id = run_span.attributes[semconv.RUN_ID]
    assert {e.attributes[semconv.RUN_ID] for e in events} == {run_id}
    assert not any(semconv.LATE in e.attributes for e in events)


def test_two_hundred_scalars_of_one_step_arrive_whole(instrumented: Collected, logger: Any) -> None:
    """A log record keeps 128 attributes; a body keeps all."""
    for i in range(200):
        key = f"rewards/{i}"
        logger.log("global", key, float(i), "train", 7)
    logger.close()
    (event,) = instrumented.events(semconv.STEP_COMPLETED)
    assert event.body == {f"tunix.rewards.{i}": float(i) for i in range(200)}
    assert event.attributes[semconv.METRICS_PREFIX] == "global"


def test_prefixes_count_their_own_steps(instrumented: Collected, logger: Any) -> None:
    """Actor counts updates from 1, global counts global steps from 0: two series of events."""
    logger.log("global", "reward", 0.5, "train", 0)
    logger.log("actor", "loss", 1.0, "train", 1)
    logger.log("global", "reward", 0.6, "train", 1)
    logger.log("actor", "loss", 0.9, "train", 2)
    logger.close()
    assert sorted(
        (e.attributes[semconv.METRICS_PREFIX], e.attributes[semconv.TRAINING_STEP])
        for e in instrumented.events(semconv.STEP_COMPLETED)
    ) == [("actor", 1), ("actor", 2), ("global", 0), ("global", 1)]


def test_step_events_can_be_switched_off(collected: Collected) -> None:
    """Gauges stay."""
    from tunix.sft import metrics_logger

    TunixInstrumentor().instrument(**collected.providers(), step_events=False)
    try:
        logger = metrics_logger.MetricsLogger()
        logger.log("", "loss", 1.0, "train", 1)
        logger.close()
    finally:
        TunixInstrumentor().uninstrument()
    assert collected.events() == []
    assert collected.gauges()[semconv.TRAINING_LOSS, TRAIN] == 1.0


def test_a_pending_value_blocks_nothing(instrumented: Collected, logger: Any) -> None:
    """log() returns while the device still computes; the value arrives afterwards."""

    @jax.jit
    def slow(x: Any) -> Any:
        matrix = jnp.full((700, 700), x)
        return jax.lax.fori_loop(0, 60, lambda _, m: jnp.tanh(m @ m), matrix)[0, 0]

    expected = float(slow(2.5))
    pending = slow(2.5)
    assert not pending.is_ready()
    logger.log("", "loss", pending, "train", 1)
    assert not pending.is_ready()
    assert (semconv.TRAINING_LOSS, TRAIN) not in instrumented.gauges()
    jax.block_until_ready(pending)
    logger.log("", "other", 1.0, "train", 1)
    assert instrumented.gauges()[semconv.TRAINING_LOSS, TRAIN] == expected


def test_nonfinite_values_count_and_leave_the_gauge(instrumented: Collected, logger: Any) -> None:
    """The gauge keeps its last finite value; the counter and the event tell of the others."""
    for step, loss in enumerate([1.0, math.nan, math.inf], start=1):
        logger.log("", "loss", loss, "train", step)
    logger.close()
    gauges = instrumented.gauges()
    assert gauges[semconv.TRAINING_LOSS, TRAIN] == 1.0
    named = TRAIN | {(semconv.METRICS_NAME, "loss")}
    assert gauges[semconv.TRAINING_NONFINITE, named] == 2
    assert gauges[semconv.TRAINING_STEP_GAUGE, TRAIN] == 3
    events = instrumented.events(semconv.STEP_COMPLETED)
    assert [e.attributes.get(semconv.NONFINITE) for e in events] == [None, ("loss",), ("loss",)]


def test_the_librarys_own_history_is_what_it_was(instrumented: Collected, logger: Any) -> None:
    """Its call comes first and sees the caller's very value."""
    logger.log(
        metrics_prefix="", metric_name="loss", scalar_value=np.float32(2.0), mode="train", step=1
    )
    assert logger.get_metric("", "loss", "train") == 2.0
    assert instrumented.gauges()[semconv.TRAINING_LOSS, TRAIN] == 2.0


def test_an_exception_of_the_librarys_log_passes(instrumented: Collected, logger: Any) -> None:
    """And nothing is emitted for it."""
    with pytest.raises(TypeError):
        logger.log("", "loss")
    assert instrumented.gauges() == {}


def test_a_library_that_emits_gauges_itself_is_left_to_it(
    instrumented: Collected, logger: Any
) -> None:
    """No gauge comes twice; the step events come all the same."""
    logger._otel_meter = object()
    logger.log("", "loss", 1.0, "train", 1)
    logger.close()
    assert instrumented.gauges() == {}
    assert len(instrumented.events(semconv.STEP_COMPLETED)) == 1


def test_streams_go_with_their_loggers(instrumented: Collected) -> None:
    """Nothing is kept of a logger that is gone."""
    from tunix.sft import metrics_logger

    gc.collect()
    streams, held = len(metrics._streams), len(_process._unfinished)
    for _ in range(10):
        logger = metrics_logger.MetricsLogger()
        logger.log("", "loss", 1.0, "train", 1)
        logger.close()
    del logger
    gc.collect()
    assert len(metrics._streams) <= streams
    assert len(_process._unfinished) <= held


def test_loggers_that_compare_equal_or_have_no_hash_are_told_apart(
    instrumented: Collected,
) -> None:
    """A stream belongs to one logger, whatever its class says about equality."""
    from tunix.sft import metrics_logger

    @dataclasses.dataclass
    class Equal(metrics_logger.MetricsLogger):
        def __post_init__(self) -> None:
            super().__init__()

    for logger in (Equal(), Equal()):
        logger.log("", "loss", 1.0, "train", 1)
        logger.close()
    assert len(instrumented.events(semconv.STEP_COMPLETED)) == 2


class BrokenGauge:
    def set(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("broken gauge")


def test_a_failing_meter_provider_stays_telemetrys_problem(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's own exception comes out, uninstrument works, and the thread is gone."""
    monkeypatch.setattr(
        "opentelemetry.sdk.metrics.Meter.create_gauge", lambda *_, **__: BrokenGauge()
    )

    def data() -> Iterator[Any]:
        yield from toy_sft.batches(3)
        raise KeyError("the user's own")

    TunixInstrumentor().instrument(**collected.providers())
    with pytest.raises(KeyError, match="the user's own"):
        toy_sft.Run(updates=9).train(data())
    TunixInstrumentor().uninstrument()
    assert "tunix-telemetry" not in {thread.name for thread in threading.enumerate()}
    assert caplog.records


def test_a_log_processor_that_logs_metrics_comes_to_an_end(
    collected: Collected,
) -> None:
    """Each event makes one more value: a flush emits what it found and returns."""
    from tunix.sft import metrics_logger

    logger = metrics_logger.MetricsLogger()

    class Echo(LogRecordProcessor):
        count = 0

        def on_emit(self, log_record: Any) -> None:
            Echo.count += 1
            logger.log("echo", "events", Echo.count, "train", Echo.count)

        def shutdown(self) -> None: ...

        def force_flush(self, timeout_millis: int = 0) -> bool:
            return True

    collected.logger_provider.add_log_record_processor(Echo())
    TunixInstrumentor().instrument(**collected.providers())
    try:
        for step in range(5):
            logger.log("", "loss", 1.0, "train", step)
        logger.close()
    finally:
        TunixInstrumentor().uninstrument()
    assert 5 <= Echo.count < 100


def test_steps_and_names_that_otlp_cannot_carry_harm_no_event(
    instrumented: Collected, logger: Any
) -> None:
    """A step outside int64 has no event; text that is no valid UTF-8 is escaped."""
    logger.log("", "loss", 1.0, "train", 2**70)
    logger.log("a\udcff", "b\udcff", math.nan, "train", 1)
    logger.close()
    (event,) = instrumented.events(semconv.STEP_COMPLETED)
    assert str(dict(event.attributes)).encode("utf-8")
    assert event.attributes[semconv.TRAINING_STEP] == 1


def test_a_runs_end_leaves_the_steps_of_another_run_open(instrumented: Collected) -> None:
    """And each event carries the id of the run in which its value was logged."""
    from tunix.sft import metrics_logger

    handler = telemetry.active()
    logger = metrics_logger.MetricsLogger()
    ids = {}

    def other() -> None:
        with context.run(handler, dict, lambda run: metrics.flush(handler, run)):
            ids["other"] = context.current_run().id
            logger.log("other", "loss", 1.0, "train", 7)
            first_logged.set()
            ended.wait(30)
            logger.log("other", "lr", 1.0, "train", 7)

    first_logged, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    with context.run(handler, dict, lambda run: metrics.flush(handler, run)):
        ids["main"] = context.current_run().id
        thread.start()
        assert first_logged.wait(30)
        logger.log("main", "loss", 1.0, "train", 1)
    ended.set()
    thread.join()
    main, other_event = instrumented.events(semconv.STEP_COMPLETED)
    assert main.attributes[semconv.RUN_ID] == ids["main"]
    assert other_event.attributes[semconv.RUN_ID] == ids["other"]
    assert len(other_event.body) == 2


@pytest.mark.parametrize(("policy", "speaks"), [("zero", False), ("errors", False), ("all", True)])
def test_other_processes_speak_as_the_policy_says(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, policy: str, speaks: bool
) -> None:
    """Process 1 of a job: silent unless all are to speak, and then with its index."""
    monkeypatch.setattr(_process, "process_index", lambda: 1)
    TunixInstrumentor().instrument(**collected.providers(), processes=policy)
    try:
        run = toy_sft.Run(updates=1)
        run.train(toy_sft.batches(1))
    finally:
        TunixInstrumentor().uninstrument()
    assert bool(collected.spans()) is speaks
    gauges = collected.gauges()  # once: older SDKs do not repeat an idle gauge
    assert bool(gauges) is speaks
    assert bool(collected.events()) is speaks
    emitted = [*collected.spans(), *collected.events()]
    assert {item.attributes[semconv.PROCESS_INDEX] for item in emitted} <= {1}
    indices = {dict(attributes).get(semconv.PROCESS_INDEX) for _, attributes in gauges}
    assert indices == ({1} if speaks else set())


def test_errors_of_other_processes_are_seen_where_the_policy_says_so(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the spans that failed, with the exception and the time they really took."""
    monkeypatch.setattr(_process, "process_index", lambda: 1)

    def data() -> Iterator[Any]:
        yield from toy_sft.batches(1)
        raise ValueError("bad shard")

    TunixInstrumentor().instrument(**collected.providers(), processes="errors")
    try:
        with pytest.raises(ValueError, match="bad shard"):
            toy_sft.Run(updates=3).train(data())
    finally:
        TunixInstrumentor().uninstrument()
    (span,) = collected.spans()
    assert span.name == semconv.RUN
    assert span.attributes[semconv.ERROR_TYPE] == "ValueError"
    assert span.attributes[semconv.PROCESS_INDEX] == 1
    assert span.end_time - span.start_time > 10**6
    (event,) = collected.events()
    assert event.event_name == semconv.EXCEPTION


def test_a_healthy_logger_makes_no_noise(
    instrumented: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    """No log record of ours at any level."""
    caplog.set_level(logging.DEBUG, "opentelemetry.instrumentation.tunix")
    run = toy_sft.Run(updates=2)
    run.train(toy_sft.batches(2))
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []
