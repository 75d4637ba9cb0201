# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What JAX compiles is told of: which function, how long, why again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import toy_sft
from in_memory import Collected
from jax._src import monitoring
from opentelemetry.instrumentation.tunix import TunixInstrumentor, compilation, semconv
from opentelemetry.instrumentation.tunix.compilation import Compilation
from opentelemetry.trace import StatusCode

_TRACE, _LOWER, _BACKEND = compilation._PHASES


def a_function(rounds: int = 1) -> tuple[str, Callable[[Any], Any]]:
    """A function that JAX has not compiled yet, and its name."""
    name = f"f_{uuid.uuid4().hex}"

    def function(x: Any) -> Any:
        for i in range(rounds):
            x = jnp.tanh(x) * (i + 1.5)
        return x

    function.__name__ = function.__qualname__ = name
    return name, jax.jit(function)


@pytest.fixture
def listening(instrumented: Collected) -> Iterator[Collected]:
    compilation.listen()
    yield instrumented
    compilation.stop_listening()


def count(collected: Collected, name: str) -> int:
    points = collected.points(semconv.COMPILATIONS)
    return sum(p.value for p in points if p.attributes[semconv.JIT_FUNCTION] == name)


def listeners() -> tuple[int, int]:
    """How often each of ours is registered."""
    return (
        monitoring.get_event_time_span_listeners().count(compilation._on_phase),
        monitoring.get_event_listeners().count(compilation._on_event),
    )


def test_listeners_are_registered_once_and_taken_out_exactly() -> None:
    """Others' stay where they are."""

    def of_another(*_: Any, **__: Any) -> None: ...

    jax.monitoring.register_event_listener(of_another)
    before = (list(monitoring.get_event_listeners()), monitoring.get_event_time_span_listeners())
    compilation.listen()
    compilation.listen()
    assert listeners() == (1, 1)
    compilation.stop_listening()
    compilation.stop_listening()
    assert (monitoring.get_event_listeners(), monitoring.get_event_time_span_listeners()) == before
    jax.monitoring.unregister_event_listener(of_another)


def test_each_compilation_is_counted_and_timed(listening: Collected) -> None:
    """By function; calling it again compiles nothing."""
    name, function = a_function()
    for _ in range(3):
        function(1.0)
    assert count(listening, name) == 1
    (point,) = [
        p
        for p in listening.points(semconv.COMPILE_DURATION)
        if p.attributes[semconv.JIT_FUNCTION] == name
    ]
    assert point.count == 1
    assert point.sum > 0


def test_short_ones_outside_a_step_are_counted_and_not_drawn(
    listening: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dozens of helpers are compiled in a run."""
    monkeypatch.setattr(compilation, "_LONG", 1e9)
    name, function = a_function()
    function(1.0)
    assert count(listening, name) == 1
    assert listening.spans(semconv.JIT_COMPILE) == []


def test_long_ones_are_spans_with_their_phases(
    listening: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever function it is; the phases lie in the span."""
    monkeypatch.setattr(compilation, "_LONG", 0.0)
    name, function = a_function(rounds=20)
    function(1.0)
    (span,) = [
        s
        for s in listening.spans(semconv.JIT_COMPILE)
        if s.attributes[semconv.JIT_FUNCTION] == name
    ]
    phases = [
        span.attributes[key]
        for key in (
            semconv.JIT_TRACE_DURATION,
            semconv.JIT_LOWER_DURATION,
            semconv.JIT_BACKEND_DURATION,
        )
    ]
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in phases)
    assert sum(phases) <= (span.end_time - span.start_time) / 1e9 + 1e-3


def told(*phases: tuple[str, float, float], name: str = "f") -> list[Compilation]:
    """What a call makes of phases that JAX tells of."""
    before = compilation.begin_call()
    for event, start, end in phases:
        decorated = name if event == _TRACE else f"jit({name})"
        compilation._on_phase(event, start, end, fun_name=decorated)
    return compilation.end_call(before)


def test_phases_are_joined_by_the_functions_name(listening: Collected) -> None:
    """It is decorated in later phases."""
    (one,) = told((_TRACE, 1.0, 2.0), (_LOWER, 2.0, 2.5), (_BACKEND, 2.5, 4.0))
    assert (one.function, one.start_ns, one.end_ns) == ("f", 10**9, 4 * 10**9)
    assert list(one.phases.values()) == [1.5, 0.5, 1.0]
    assert one.seconds == 3


def test_a_trace_that_was_not_compiled_then_is_not_part_of_it(listening: Collected) -> None:
    """Tracing for shapes alone may have been hours ago."""
    (one,) = told((_TRACE, 1.0, 2.0), (_LOWER, 100.0, 101.0), (_BACKEND, 101.0, 102.0))
    assert one.seconds == 2
    assert semconv.JIT_TRACE_DURATION not in one.phases


def test_what_is_compiled_during_a_trace_is_told_apart(listening: Collected) -> None:
    """Constants that are computed while a function is traced."""
    before = compilation.begin_call()
    compilation._on_phase(_BACKEND, 1.2, 1.4, fun_name="jit(helper)")
    compilation._on_phase(_TRACE, 1.0, 2.0, fun_name="f")
    compilation._on_phase(_BACKEND, 2.0, 3.0, fun_name="jit(f)")
    helper, function = compilation.end_call(before)
    assert (helper.function, round(helper.seconds, 6)) == ("helper", 0.2)
    assert (function.function, function.seconds) == ("f", 2)


@pytest.mark.parametrize(("event", "answer"), [("cache_hits", "hit"), ("cache_misses", "miss")])
def test_the_persistent_caches_answer_belongs_to_the_thread_that_compiles(
    listening: Collected, event: str, answer: str
) -> None:
    """Cache events carry no name."""
    other = threading.Thread(
        target=compilation._on_event, args=("/jax/compilation_cache/cache_hits",)
    )
    other.start()
    other.join()
    compilation._on_event(f"/jax/compilation_cache/{event}")
    first, second = told((_BACKEND, 1.0, 2.0), (_BACKEND, 2.0, 3.0))
    assert (first.cache, second.cache) == (answer, None)


def test_a_real_cache_is_asked_and_answers(listening: Collected, tmp_path: Any) -> None:
    """A miss, and after JAX has forgotten the function a hit."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {key: getattr(jax.config, key) for key in options}
    from jax.experimental.compilation_cache import compilation_cache

    try:
        for key, value in options.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()
        name, function = a_function()
        answers = []
        for _ in range(2):
            started = compilation.begin_call()
            function(1.0)
            answers += [c.cache for c in compilation.end_call(started) if c.function == name]
            function.clear_cache()
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()
    assert answers == ["miss", "hit"]


def test_function_names_on_metrics_are_bounded(
    listening: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may make functions in a loop."""
    monkeypatch.setattr(compilation, "_names", set())
    monkeypatch.setattr(compilation, "_MOST_NAMES", 3)
    for i in range(6):
        told((_BACKEND, 1.0, 2.0), name=f"g{i}")
    assert [count(listening, name) for name in ("g0", "g2", "g3", "other")] == [1, 1, 0, 3]


def test_a_failure_of_ours_does_not_reach_the_call_that_compiles(
    listening: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX hands an exception of a listener to whoever called the function."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(compilation, "_take", broken)
    _, function = a_function()
    assert function(0.0) == 0.0
    assert len(caplog.records) == 1


# In a run ---------------------------------------------------------------------------------------


def length_changes(count: int, at: int) -> Iterator[Any]:
    """Batches of which the rows double from one of them on."""
    for number, batch in enumerate(toy_sft.batches(count), 1):
        if number < at:
            yield batch
        else:
            yield type(batch)(
                input_tokens=jnp.concatenate([batch.input_tokens] * 2),
                input_mask=jnp.concatenate([batch.input_mask] * 2),
            )


def test_a_new_batch_shape_is_one_recompilation_that_names_both(instrumented: Collected) -> None:
    """At its step, at WARN, in its step's trace, and as a second span of the compilation."""
    jax.clear_caches()
    toy_sft.Run(updates=9).train(length_changes(9, at=7))
    (record,) = instrumented.events(semconv.RECOMPILATION)
    assert record.severity_text == "WARN"
    assert record.attributes[semconv.TRAINING_STEP] == 7
    assert record.attributes[semconv.JIT_CHANGES] == (
        "input_tokens: int32[4,16] -> int32[8,16]",
        "input_mask: bool[4,16] -> bool[8,16]",
    )
    steps = {
        s.attributes[semconv.TRAINING_STEP]: s for s in instrumented.spans("tunix.model.train")
    }
    assert record.span_id == steps[7].context.span_id
    drawn = [
        s
        for s in instrumented.spans(semconv.JIT_COMPILE)
        if s.attributes[semconv.JIT_FUNCTION] == record.attributes[semconv.JIT_FUNCTION]
    ]
    assert {s.parent.span_id for s in drawn if s.parent} >= {steps[7].context.span_id}
    for span in drawn:
        assert span.status.status_code is StatusCode.UNSET


def test_a_run_of_one_shape_is_never_compiled_again(instrumented: Collected) -> None:
    """Also where the trainer is used twice, and with evaluations in between."""
    run = toy_sft.Run(updates=None, eval_every=2)
    run.trainer.is_managed_externally = True
    for _ in range(2):
        run.train(toy_sft.batches(3), toy_sft.eval_batches())
    assert instrumented.events(semconv.RECOMPILATION) == []


@pytest.mark.parametrize("clears", ["user", "library"])
def test_listeners_that_were_cleared_are_put_back(instrumented: Collected, clears: str) -> None:
    """A user may clear all of them, and google-tunix does whenever a logger closes."""
    from tunix.sft import metrics_logger

    run = toy_sft.Run(updates=None)
    run.trainer.is_managed_externally = True
    run.train(toy_sft.batches(1))
    if clears == "user":
        jax.monitoring.clear_event_listeners()
    else:
        metrics_logger.MetricsLogger().close()
    run.train(length_changes(2, at=2))
    assert len(instrumented.events(semconv.RECOMPILATION)) == 1
    assert listeners() == (1, 1)


def test_uninstrumenting_ends_the_listening(collected: Collected) -> None:
    """The lists are as they were."""
    jax.monitoring.clear_event_listeners()
    instrumentor = TunixInstrumentor()
    instrumentor.instrument(**collected.providers())
    toy_sft.Run(updates=1).train(toy_sft.batches(1))
    assert listeners() == (1, 1)
    instrumentor.uninstrument()
    assert listeners() == (0, 0)


def test_uncompiled_steps_are_no_recompilations(instrumented: Collected) -> None:
    """Without jit every operation is compiled by itself, and none of them is the step."""
    run = toy_sft.Run(updates=1)
    step, *_ = run.trainer.jit_train_and_eval_step(skip_jit=True)
    for batch in length_changes(2, at=2):
        step(run.model, run.trainer.optimizer, batch)
    assert instrumented.events(semconv.RECOMPILATION) == []
