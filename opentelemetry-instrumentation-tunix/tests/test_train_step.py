# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""One train step: its span from dispatch to completion, its measurements, its errors."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import linear_sft
import numpy as np
import pytest
from in_memory import Collected
from opentelemetry.instrumentation.tunix import TunixInstrumentor, semconv
from opentelemetry.instrumentation.tunix.accounting import Bucket, Phase
from opentelemetry.instrumentation.tunix.train_step import TrainStep
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

HEAVY = 3000  # matrix products: some tens of milliseconds


def steps(collected: Collected) -> list[Any]:
    """Train steps in the order of their start."""
    return sorted(collected.spans(semconv.MODEL_TRAIN), key=lambda span: span.start_time)


def seconds(collected: Collected) -> dict[tuple[str, str], float]:
    """(bucket, phase) to seconds, all meshes."""
    return {
        (p.attributes[semconv.TIME_BUCKET], p.attributes[semconv.TIME_PHASE]): p.value
        for p in collected.points(semconv.TIME)
    }


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_span_lasts_until_the_device_has_finished(
    instrumented: Collected, accumulation: int
) -> None:
    """Longer than its call, in parts that fit together, one behind the other."""
    trainer = linear_sft.trainer(rounds=HEAVY, accumulation=accumulation)
    trainer.train(linear_sft.batches(8))
    spans = steps(instrumented)
    assert len(spans) == 8
    ended = 0
    for span in spans[1:]:
        a = span.attributes
        assert a[semconv.HOST_ONLY] is False
        dispatch, queue, device = (
            a[key]
            for key in (
                semconv.DISPATCH_DURATION,
                semconv.QUEUE_DURATION,
                semconv.DEVICE_DURATION,
            )
        )
        duration = (span.end_time - span.start_time) / 1e9
        assert 0 < dispatch < duration
        assert device <= duration + 1e-6
        assert duration <= dispatch + queue + device + 1e-6
        assert span.end_time >= ended
        ended = span.end_time
    assert sum(s.attributes[semconv.DEVICE_DURATION] for s in spans) <= (
        (spans[-1].end_time - spans[0].start_time) / 1e9 + 1e-3
    )


def test_durations_are_measured_as_the_spans_say(instrumented: Collected) -> None:
    """Two histograms with the same numbers, by role."""
    linear_sft.trainer(rounds=10).train(linear_sft.batches(5))
    spans = steps(instrumented)
    (whole,) = instrumented.points(semconv.TRAIN_DURATION)
    (device,) = instrumented.points(semconv.TRAIN_DEVICE_DURATION)
    assert whole.count == device.count == 5
    assert whole.sum == pytest.approx(sum((s.end_time - s.start_time) / 1e9 for s in spans))
    assert device.sum == pytest.approx(sum(s.attributes[semconv.DEVICE_DURATION] for s in spans))
    assert dict(whole.attributes) == dict(device.attributes) == {semconv.ROLE: "trainer"}


def test_sampling_changes_no_measurement(collected: Collected) -> None:
    """No span is recorded; durations and time are whole."""
    instrumentor = TunixInstrumentor()
    providers = {**collected.providers(), "tracer_provider": TracerProvider(sampler=ALWAYS_OFF)}
    instrumentor.instrument(**providers)
    try:
        linear_sft.trainer(rounds=10).train(linear_sft.batches(5))
    finally:
        instrumentor.uninstrument()
    assert collected.spans() == []
    (point,) = collected.points(semconv.TRAIN_DURATION)
    assert point.count == 5
    assert (Bucket.PRODUCTIVE, Phase.TRAIN) in seconds(collected)


def test_without_device_time_nothing_waits_and_the_span_says_so(collected: Collected) -> None:
    """Spans end with their call; what is not known is not measured."""
    instrumentor = TunixInstrumentor()
    instrumentor.instrument(**collected.providers(), device_time=False)
    try:
        linear_sft.trainer(rounds=10).train(linear_sft.batches(3))
        assert [t.name for t in threading.enumerate() if t.name == "tunix-watcher"] == []
    finally:
        instrumentor.uninstrument()
    assert [s.attributes[semconv.HOST_ONLY] for s in steps(collected)] == [True] * 3
    assert all(semconv.DEVICE_DURATION not in s.attributes for s in steps(collected))
    assert collected.points(semconv.TRAIN_DURATION) == collected.points(semconv.TIME) == []


def test_the_training_thread_blocks_as_often_as_without_telemetry(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits for arrays and copies to the host are counted on that thread."""
    array_type = type(jax.numpy.ones(()))
    here = threading.get_ident()
    count = 0

    def counted(name: str) -> Any:
        original = getattr(array_type, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += threading.get_ident() == here
            return original(self, *args, **kwargs)

        return method

    for name in ("block_until_ready", "__array__", "__float__", "item"):
        monkeypatch.setattr(array_type, name, counted(name))

    def blocked() -> int:
        nonlocal count
        trainer = linear_sft.trainer(rounds=10, accumulation=2)
        count = 0
        trainer.train(linear_sft.batches(8))
        return count

    plain, control = blocked(), blocked()
    assert plain == control > 0
    instrumentor = TunixInstrumentor()
    instrumentor.instrument(**collected.providers())
    try:
        assert blocked() == plain
    finally:
        instrumentor.uninstrument()


class Failing:
    """A host function that fails at one batch, after having taken its time."""

    def __init__(self, at: int, seconds: float = 0.0) -> None:
        self.at = at
        self.seconds = seconds

    def __call__(self, number: Any) -> Any:
        if round(float(number) * 1e3) == self.at:
            time.sleep(self.seconds)
            raise RuntimeError("the device has failed")
        return np.float32(0)


def test_a_step_that_fails_is_the_failed_span_and_later_ones_are_right(
    instrumented: Collected,
) -> None:
    """The caller gets what JAX raised. The failed trainer's state is gone; another one goes on."""
    trainer = linear_sft.trainer(accumulation=4, on_host=Failing(at=6))
    with pytest.raises(Exception, match="the device has failed") as caught:
        trainer.train(linear_sft.batches(8))
    linear_sft.trainer(accumulation=4).train(linear_sft.batches(4))
    spans = steps(instrumented)
    failed = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert [spans.index(span) for span in failed] == [5]
    assert failed[0].attributes[semconv.ERROR_TYPE].endswith(type(caught.value).__qualname__)
    assert all(span.attributes[semconv.HOST_ONLY] is False for span in spans[6:])
    by_error = {
        p.attributes.get(semconv.ERROR_TYPE): p.count
        for p in instrumented.points(semconv.TRAIN_DURATION)
    }
    assert by_error == {None: len(spans) - 1, failed[0].attributes[semconv.ERROR_TYPE]: 1}


class Broken:
    """Stands for a loss whose computation fails after the call: the CPU backend has none."""

    sharding = jax.numpy.ones(()).sharding
    error = RuntimeError("found out later")

    def block_until_ready(self) -> None:
        raise self.error

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True


def test_an_error_that_the_device_reports_later_marks_its_own_step(
    instrumented: Collected,
) -> None:
    """The step that caused it, not the one that was running or the last."""
    good = jax.numpy.ones(())
    results = iter([(good,), (Broken(),), (good,)])
    step = TrainStep(lambda _: next(results), linear_sft.trainer())
    for batch in linear_sft.batches(3):
        step(batch)
    spans = steps(instrumented)
    assert [span.status.status_code for span in spans] == [
        StatusCode.UNSET,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    assert spans[1].attributes[semconv.ERROR_TYPE] == "RuntimeError"
    (record,) = instrumented.events(semconv.EXCEPTION)
    assert record.span_id == spans[1].context.span_id


def test_the_reference_pass_of_a_batch_is_not_charged_to_its_step(instrumented: Collected) -> None:
    """Trainers that compute inputs on the device: that work is accounted for as what it is."""
    base = type(linear_sft.trainer())
    reference = jax.jit(
        lambda x: jax.lax.fori_loop(0, HEAVY, lambda _, y: jax.numpy.tanh(y @ x), x) + x
    )

    class WithReference(base):
        def _prepare_inputs(self, batch: Any) -> Any:
            return reference(batch)

    trainer = linear_sft.trainer()
    trainer.__class__ = WithReference
    trainer.train(linear_sft.batches(2))
    instrumented.clear()
    trainer.train(linear_sft.batches(6))
    spent = seconds(instrumented)
    on_steps = sum(s.attributes[semconv.DEVICE_DURATION] for s in steps(instrumented))
    assert spent[Bucket.PRODUCTIVE, Phase.INPUTS] > 0
    assert on_steps < spent[Bucket.PRODUCTIVE, Phase.INPUTS]


# The account of whole runs ----------------------------------------------------------------------


def compute_bound(_: Any) -> Any:
    trainer = linear_sft.trainer(rounds=HEAVY)
    return trainer, lambda: trainer.train(linear_sft.batches(20))


def data_bound(_: Any) -> Any:
    trainer = linear_sft.trainer()

    def slow() -> Any:
        for batch in linear_sft.batches(10):
            time.sleep(0.03)
            yield batch

    return trainer, lambda: trainer.train(slow())


def checkpoint_heavy(folder: Any) -> Any:
    trainer = linear_sft.trainer(checkpoints=str(folder))
    return trainer, lambda: trainer.train(linear_sft.batches(6))


def eval_heavy(_: Any) -> Any:
    trainer = linear_sft.trainer(rounds=HEAVY, eval_every=2)
    return trainer, lambda: trainer.train(linear_sft.batches(4), list(linear_sft.batches(8)))


def failing(_: Any) -> Any:
    trainer = linear_sft.trainer(on_host=Failing(at=3, seconds=1.0))

    def run() -> None:
        with pytest.raises(Exception, match="the device has failed"):
            trainer.train(linear_sft.batches(5))

    return trainer, run


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (compute_bound, (Bucket.PRODUCTIVE, Phase.TRAIN)),
        (data_bound, (Bucket.OVERHEAD, Phase.DATA)),
        (checkpoint_heavy, (Bucket.OVERHEAD, Phase.CHECKPOINT)),
        (eval_heavy, (Bucket.OVERHEAD, Phase.EVAL)),
        (failing, (Bucket.WASTED, Phase.TRAIN)),
    ],
)
def test_the_time_of_a_run_adds_up_and_shows_what_it_was_spent_on(
    collected: Collected, tmp_path: Any, make: Any, expected: tuple[str, str]
) -> None:
    """Within a hundredth of the duration of tunix.run."""
    trainer, run = make(tmp_path)
    trainer.train(linear_sft.batches(1), list(linear_sft.batches(1)))  # compiles
    instrumentor = TunixInstrumentor()
    instrumentor.instrument(**collected.providers())
    try:
        run()
    finally:
        instrumentor.uninstrument()
    spent = seconds(collected)
    (span,) = collected.spans(semconv.RUN)
    assert sum(spent.values()) == pytest.approx((span.end_time - span.start_time) / 1e9, rel=0.01)
    assert max(spent, key=spent.__getitem__) == expected
