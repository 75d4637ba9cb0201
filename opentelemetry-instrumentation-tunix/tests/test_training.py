# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised training on the installed Tunix: the spans it gives, and that it is not changed."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import toy_sft
from in_memory import Collected
from opentelemetry.instrumentation.tunix import TunixInstrumentor, semconv, train_step
from opentelemetry.trace import StatusCode

UPDATES = 4


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_run_gives_the_spans_its_numbers_call_for(
    instrumented: Collected,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    accumulation: int,
) -> None:
    """Counts follow from updates, accumulation, evaluation and checkpoint intervals."""
    caplog.set_level(logging.INFO, "opentelemetry.instrumentation.tunix")
    run = toy_sft.Run(
        updates=UPDATES,
        accumulation=accumulation,
        eval_every=2,
        checkpoints=str(tmp_path),
        save_every=3,
    )
    run.train(toy_sft.batches(1000), toy_sft.eval_batches())

    evaluations = [0, *(u for u in range(1, UPDATES + 1) if u % 2 == 0)]  # and one at entry
    # Orbax saves the first step it sees, then each third, and closing saves the last.
    saves = sorted({1, *(u for u in range(1, UPDATES + 1) if u % 3 == 0), UPDATES})
    assert Counter(instrumented.names()) == {
        semconv.RUN: 1,
        semconv.MODEL_TRAIN: UPDATES * accumulation,
        semconv.MODEL_EVAL: len(evaluations),
        semconv.CHECKPOINT_SAVE: len(saves),
    }
    steps = instrumented.spans(semconv.MODEL_TRAIN)
    assert [
        (s.attributes[semconv.TRAINING_STEP], s.attributes[semconv.TRAINING_MICRO_STEP])
        for s in steps
    ] == [(u, m) for u in range(1, UPDATES + 1) for m in range(1, accumulation + 1)]
    assert all(s.attributes[semconv.HOST_ONLY] is False for s in steps)
    for name, expected in ((semconv.MODEL_EVAL, evaluations), (semconv.CHECKPOINT_SAVE, saves)):
        spans = instrumented.spans(name)
        assert [s.attributes[semconv.TRAINING_STEP] for s in spans] == expected
    (run_span,) = instrumented.spans(semconv.RUN)
    for span in instrumented.spans():
        assert span.status.status_code is StatusCode.UNSET
        assert span.attributes[semconv.RUN_ID] == run_span.attributes[semconv.RUN_ID]
        if span is not run_span:
            assert [link.context for link in span.links] == [run_span.context]
            assert run_span.start_time <= span.start_time <= span.end_time <= run_span.end_time
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []


class Compilations:
    """Counts what JAX compiles while a block runs."""

    def __enter__(self) -> Counter[str]:
        self._count: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self._count

    def _on_event(self, event: str, duration: float, **metadata: Any) -> None:
        if event.endswith("backend_compile_duration"):
            self._count[str(metadata.get("fun_name"))] += 1

    def __exit__(self, *_: object) -> None:
        # google-tunix clears every listener when its logger closes.
        if self._on_event in jax._src.monitoring.get_event_duration_listeners():
            jax.monitoring.unregister_event_duration_listener(self._on_event)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_losses_parameters_and_compilations_are_those_of_an_uninstrumented_run(
    collected: Collected, accumulation: int
) -> None:
    """Bit for bit, after two uninstrumented runs have agreed bit for bit."""

    def train() -> tuple[list[float], list[np.ndarray], Counter[str]]:
        jax.clear_caches()
        run = toy_sft.Run(updates=3, accumulation=accumulation)
        with Compilations() as compiled:
            run.train(toy_sft.batches(1000))
        return run.losses, run.parameters(), compiled

    def equal(a: Any, b: Any) -> bool:
        same = all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        return a[0] == b[0] and same and a[2] == b[2]

    plain, control = train(), train()
    assert sum(plain[2].values()) > 0
    assert equal(plain, control)
    TunixInstrumentor().instrument(**collected.providers())
    try:
        instrumented = train()
    finally:
        TunixInstrumentor().uninstrument()
    assert equal(plain, instrumented)
    assert len(collected.spans(semconv.MODEL_TRAIN)) == 3 * accumulation


def test_checkpoints_are_spans_only_where_one_was_written(instrumented: Collected) -> None:
    """The trainer asks to save after each update; without a folder nothing is saved."""
    toy_sft.Run(updates=2).train(toy_sft.batches(10))
    assert instrumented.spans(semconv.CHECKPOINT_SAVE) == []


def test_a_resumed_run_counts_on_and_has_no_span_for_skipped_batches(
    instrumented: Collected, tmp_path: Any
) -> None:
    """Steps 3 and 4 of 4, after a first run of 2."""
    toy_sft.Run(updates=2, checkpoints=str(tmp_path)).train(toy_sft.batches(10))
    instrumented.clear()
    toy_sft.Run(updates=4, checkpoints=str(tmp_path)).train(toy_sft.batches(10))
    steps = instrumented.spans(semconv.MODEL_TRAIN)
    assert [s.attributes[semconv.TRAINING_STEP] for s in steps] == [3, 4]


def test_a_restored_checkpoint_is_a_span_and_a_search_that_finds_none_is_not(
    instrumented: Collected, tmp_path: Any
) -> None:
    """It happens when the trainer is made: before the run, a trace of its own."""
    toy_sft.Run(updates=2, checkpoints=str(tmp_path)).train(toy_sft.batches(10))
    assert instrumented.spans(semconv.CHECKPOINT_RESTORE) == []
    toy_sft.Run(updates=4, checkpoints=str(tmp_path))
    (span,) = instrumented.spans(semconv.CHECKPOINT_RESTORE)
    assert dict(span.attributes) == {semconv.TRAINING_STEP: 2}
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET


def test_a_checkpoint_that_cannot_be_read_is_a_span_with_the_error_that_the_user_gets(
    instrumented: Collected, tmp_path: Any
) -> None:
    """No step: which one was wanted is known, but nothing was restored."""
    toy_sft.Run(updates=2, checkpoints=str(tmp_path)).train(toy_sft.batches(10))
    for file in (tmp_path / "2" / "model_params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        toy_sft.Run(updates=4, checkpoints=str(tmp_path))
    (span,) = instrumented.spans(semconv.CHECKPOINT_RESTORE)
    kind = type(caught.value)
    assert span.attributes[semconv.ERROR_TYPE].rpartition(".")[2] == kind.__name__
    assert span.status.status_code is StatusCode.ERROR
    assert semconv.TRAINING_STEP not in span.attributes


class BoomError(Exception):
    """What the tests throw."""


BOOM = BoomError("at the third batch")


def failing_data() -> Iterator[Any]:
    yield from toy_sft.batches(2)
    raise BOOM


def test_a_failing_data_iterator_ends_the_run_as_error(instrumented: Collected) -> None:
    """The caller gets the same object; steps before it are whole."""
    with pytest.raises(BoomError) as caught:
        toy_sft.Run(updates=5).train(failing_data())
    assert caught.value is BOOM
    assert Counter(instrumented.names()) == {semconv.MODEL_TRAIN: 2, semconv.RUN: 1}
    assert_only_failed(instrumented, {semconv.RUN})


def test_a_failing_loss_ends_its_step_and_the_run_as_error(instrumented: Collected) -> None:
    """The exception comes out while the step is traced: inside its span."""

    def loss_fn(
        model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any
    ) -> Any:
        raise BOOM

    with pytest.raises(BoomError) as caught:
        toy_sft.Run(updates=5, loss_fn=loss_fn).train(toy_sft.batches(5))
    assert caught.value is BOOM
    assert instrumented.names() == [semconv.MODEL_TRAIN, semconv.RUN]
    assert_only_failed(instrumented, {semconv.MODEL_TRAIN, semconv.RUN})


def test_a_failing_hook_ends_the_run_as_error(instrumented: Collected) -> None:
    """A hook of the user is no part of a step."""
    from tunix.sft import hooks

    class Hooks(hooks.TrainingHooks):
        def on_train_start(self, *_: Any, **__: Any) -> None: ...
        def on_train_end(self, *_: Any, **__: Any) -> None: ...
        def on_train_step_end(self, *_: Any, **__: Any) -> None: ...
        def on_eval_step_start(self, *_: Any, **__: Any) -> None: ...
        def on_eval_step_end(self, *_: Any, **__: Any) -> None: ...
        def on_train_step_start(self, trainer: Any, **__: Any) -> None:
            if trainer.train_steps == 1:
                raise BOOM

    run = toy_sft.Run(updates=5)
    run.trainer.with_training_hooks(Hooks())
    with pytest.raises(BoomError) as caught:
        run.train(toy_sft.batches(5))
    assert caught.value is BOOM
    # The device may still be at the first step when the second one's hook ends the run.
    assert sorted(instrumented.names()) == [semconv.MODEL_TRAIN, semconv.RUN]
    assert_only_failed(instrumented, {semconv.RUN})


def assert_only_failed(collected: Collected, names: set[str]) -> None:
    failed = [s for s in collected.spans() if s.status.status_code is StatusCode.ERROR]
    assert {s.name for s in failed} == names
    assert {s.attributes[semconv.ERROR_TYPE] for s in failed} == {
        f"{BoomError.__module__}.BoomError"
    }
    assert len(collected.events(semconv.EXCEPTION)) == 1


def test_data_that_ends_early_is_no_error(instrumented: Collected) -> None:
    """Two batches for ten updates: two steps and a run that ended well."""
    toy_sft.Run(updates=10).train(toy_sft.batches(2))
    assert Counter(instrumented.names()) == {semconv.MODEL_TRAIN: 2, semconv.RUN: 1}
    assert_no_error(instrumented)


def assert_no_error(collected: Collected) -> None:
    assert {s.status.status_code for s in collected.spans()} == {StatusCode.UNSET}


def test_without_jit_each_step_is_a_span_too(instrumented: Collected) -> None:
    """skip_jit hands out bound methods instead of compiled functions."""
    run = toy_sft.Run(updates=1)
    step, *_ = run.trainer.jit_train_and_eval_step(skip_jit=True)
    step(run.model, run.trainer.optimizer, *toy_sft.batches(1))
    assert instrumented.names() == [semconv.MODEL_TRAIN]


def test_calling_the_compiled_step_directly_gives_spans_without_a_run(
    instrumented: Collected,
) -> None:
    """Frameworks that have a loop of their own ask the trainer for its compiled step."""
    run = toy_sft.Run(updates=1)
    step, *_ = run.trainer.jit_train_and_eval_step()
    (batch,) = toy_sft.batches(1)
    arguments = (batch,) if hasattr(step, "func") else (run.model, run.trainer.optimizer, batch)
    assert math.isfinite(float(step(*arguments)[0]))
    (span,) = instrumented.spans()
    assert (span.name, span.parent, span.links) == (semconv.MODEL_TRAIN, None, ())


def test_the_proxy_shows_what_it_wraps(instrumented: Collected) -> None:
    """Type, attributes, equality, hash and copies are those of the compiled function."""

    class Compiled:
        func = "attribute of the library"

        def __call__(self, batch: int) -> int:
            return batch + 1

    compiled = Compiled()
    step = train_step.TrainStep(compiled, trainer=None)
    assert isinstance(step, Compiled)
    assert step.func == "attribute of the library"
    assert step == compiled
    assert hash(step) == hash(compiled)
    assert type(copy.copy(step)) is Compiled
    assert type(copy.deepcopy(step)) is Compiled
    function = train_step.TrainStep(math.sqrt, trainer=None)
    assert pickle.loads(pickle.dumps(function)) is math.sqrt


def test_a_trainer_whose_counters_cannot_be_read_is_traced_without_them(
    instrumented: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; the step runs."""
    step = train_step.TrainStep(lambda batch: batch, trainer=object())
    assert [step(1), step(2)] == [1, 2]
    assert len(instrumented.spans(semconv.MODEL_TRAIN)) == 2
    assert len(caplog.records) == 1


def test_a_profile_of_the_users_own_is_disturbed_by_none_of_ours(
    collected: Collected, tmp_path: Any
) -> None:
    """JAX admits one profile at a time; its steps are annotated as without telemetry."""

    def annotated_steps(folder: Any) -> list[str]:
        # Calls of Python functions would crowd out the annotations.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
            toy_sft.Run(updates=3).train(toy_sft.batches(3))
        (file,) = folder.rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        return sorted(e["args"]["step_num"] for e in events if "step_num" in e.get("args", {}))

    plain = annotated_steps(tmp_path / "plain")
    TunixInstrumentor().instrument(**collected.providers())
    try:
        instrumented = annotated_steps(tmp_path / "instrumented")
    finally:
        TunixInstrumentor().uninstrument()
    assert plain
    assert instrumented == plain
    assert len(collected.spans(semconv.MODEL_TRAIN)) == 3


def test_a_guard_against_transfers_is_no_obstacle(
    instrumented: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    """What is read of the device is asked for explicitly."""
    with jax.transfer_guard_device_to_host("disallow"):
        toy_sft.Run(updates=3).train(toy_sft.batches(3))
    assert len(instrumented.spans(semconv.MODEL_TRAIN)) == 3
    assert len(instrumented.events(semconv.STEP_COMPLETED)) >= 3
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []
