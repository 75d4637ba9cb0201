# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""After uninstrument() nothing is left, however much was traced before."""

from __future__ import annotations

import gc
import importlib
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_sft
from flax import nnx
from in_memory import Collected
from jax._src import monitoring
from opentelemetry.instrumentation.tunix import TunixInstrumentor, semconv
from opentelemetry.instrumentation.tunix.targets import TARGETS

OURS = "opentelemetry.instrumentation.tunix"


def wrapped_classes() -> list[type]:
    """The classes of the table that this release has."""
    found = []
    for target in TARGETS:
        try:
            module = importlib.import_module(target.module)
        except ImportError:
            continue
        if hasattr(module, target.owner):
            found.append(getattr(module, target.owner))
    return list(dict.fromkeys(found))


def entries() -> list[dict[str, Any]]:
    return [dict(vars(cls)) for cls in wrapped_classes()]


def listeners() -> list[list[Any]]:
    """What is registered with jax.monitoring, list by list."""
    names = [name for name in dir(monitoring) if name.endswith("_listeners")]
    lists = [getattr(monitoring, name) for name in names]
    return [list(found) for found in lists if isinstance(found, list)]


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tunix")]


def whole_run(folder: Any) -> toy_sft.Run:
    run = toy_sft.Run(updates=2, eval_every=1, checkpoints=str(folder))
    run.train(toy_sft.batches(2), toy_sft.eval_batches(1))
    return run


def direct_step(run: toy_sft.Run) -> Any:
    """The trainer's compiled step as a callable of a batch alone."""
    step, *_ = run.trainer.jit_train_and_eval_step()
    bound = () if hasattr(step, "func") else (run.model, run.trainer.optimizer)
    return lambda batch: step(*bound, batch)


@pytest.fixture
def user_listeners() -> Iterator[None]:
    """Listeners of the application, one of each kind."""

    def listener(*_: Any, **__: Any) -> None: ...

    kinds = ("event", "event_duration_secs", "event_time_span", "scalar")
    for kind in kinds:
        getattr(jax.monitoring, f"register_{kind}_listener")(listener)
    yield
    for found in vars(monitoring).values():
        if isinstance(found, list) and listener in found:
            found.remove(listener)


def test_after_a_whole_run_every_class_is_what_it_is_without_instrumentation(
    collected: Collected, tmp_path: Any
) -> None:
    """The same keys and objects; what Python adds by itself is there in the control as well."""
    assert wrapped_classes()
    whole_run(tmp_path / "control")
    before = entries()
    TunixInstrumentor().instrument(**collected.providers())
    whole_run(tmp_path / "traced")
    TunixInstrumentor().uninstrument()
    assert Counter(collected.names())[semconv.MODEL_TRAIN] == 2
    for was, now in zip(before, entries(), strict=True):
        assert now.keys() == was.keys()
        assert [name for name in was if now[name] is not was[name]] == []
    assert our_threads() == []


def test_after_steps_the_listeners_of_jax_are_those_of_the_application(
    collected: Collected, user_listeners: None
) -> None:
    """List by list, object by object; no logger was closed, which would have cleared them all."""
    before = listeners()
    assert sum(len(found) for found in before) >= 4
    TunixInstrumentor().instrument(**collected.providers())
    run = toy_sft.Run(updates=None)
    direct_step(run)(*toy_sft.batches(1))
    run.trainer.is_managed_externally = True
    run.train(toy_sft.batches(1))
    TunixInstrumentor().uninstrument()
    assert len(collected.spans(semconv.MODEL_TRAIN)) == 2
    assert listeners() == before
    assert our_threads() == []


def test_a_logger_a_trainer_and_a_step_that_were_traced_fall_silent(
    collected: Collected,
) -> None:
    """They have been used, are used on, and give not a span, an event or a value more."""
    TunixInstrumentor().instrument(**collected.providers())
    run = toy_sft.Run(updates=None)
    run.trainer.is_managed_externally = True
    step = direct_step(run)
    bound = run.trainer.train, run.trainer.metrics_logger.log

    def use(loss: float) -> None:
        train, log = bound
        train(toy_sft.batches(1), toy_sft.eval_batches(1))
        step(*toy_sft.batches(1))
        log("", "loss", loss, "train", 1)

    use(1.0)
    TunixInstrumentor().uninstrument()
    spans, events, gauges = collected.names(), len(collected.events()), collected.gauges()
    assert Counter(spans)[semconv.MODEL_TRAIN] == 2
    assert events
    assert gauges[semconv.TRAINING_LOSS, frozenset({(semconv.TRAINING_MODE, "train")})] == 1.0
    use(2.0)
    assert collected.names() == spans
    assert len(collected.events()) == events
    assert {value for value in collected.gauges().values() if value == 2.0} == set()
    assert our_threads() == []


class Tiny(nnx.Module):
    """One number."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))


def tiny_trainer() -> Any:
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    trainer = PeftTrainer(Tiny(), optax.sgd(1e-3), TrainingConfig(eval_every_n_steps=1000))
    trainer.with_loss_fn(lambda model, x: jnp.mean((model.weight[...] - x) ** 2))
    trainer.is_managed_externally = True
    return trainer


def our_objects() -> Counter[str]:
    """How many objects of our classes there are, and functions of our modules."""
    gc.collect()
    count: Counter[str] = Counter()
    for found in gc.get_objects():
        cls = type(found)
        if cls is types.FunctionType:
            if str(found.__module__).startswith(OURS):
                count[f"function {found.__qualname__}"] += 1
        elif str(cls.__module__).startswith(OURS):
            count[cls.__qualname__] += 1
    return count


def test_a_hundred_cycles_of_instrumenting_and_training_leave_nothing(
    user_listeners: None,
) -> None:
    """Objects, threads and listeners are as many after a hundred as after ten."""
    trainer = tiny_trainer()

    def cycle() -> None:
        collected = Collected()
        TunixInstrumentor().instrument(**collected.providers())
        trainer.train([{"x": np.ones(2)}])
        TunixInstrumentor().uninstrument()
        assert Counter(collected.names()) == {semconv.RUN: 1, semconv.MODEL_TRAIN: 1}
        collected.shutdown()

    def state() -> tuple[Counter[str], set[threading.Thread], list[list[Any]]]:
        return our_objects(), set(threading.enumerate()), listeners()

    for _ in range(10):
        cycle()
    objects, threads, registered = state()
    for _ in range(90):
        cycle()
    objects_now, threads_now, registered_now = state()
    assert objects_now - objects == {}
    assert threads_now <= threads  # Another library's may end meanwhile.
    assert registered_now == registered
    assert our_threads() == []
    assert len(trainer.metrics_logger.get_metric_history("", "loss", "train")) == 99


def test_a_module_that_is_reloaded_is_traced_once_when_instrumented_again(
    collected: Collected,
) -> None:
    """Reloading makes new classes; they are wrapped once, and come back exactly too."""
    import tunix.sft.peft_trainer as peft_trainer

    original = dict(vars(peft_trainer))
    instrumentor = TunixInstrumentor()
    try:
        instrumentor.instrument(**collected.providers())
        instrumentor.uninstrument()
        importlib.reload(peft_trainer)
        raw = dict(vars(peft_trainer.PeftTrainer))
        for _ in range(3):
            instrumentor.instrument(**collected.providers())
            assert not hasattr(vars(peft_trainer.PeftTrainer)["train"].__wrapped__, "__wrapped__")
            collected.clear()
            tiny_trainer().train([{"x": np.ones(2)}])
            instrumentor.uninstrument()
            assert Counter(collected.names()) == {semconv.RUN: 1, semconv.MODEL_TRAIN: 1}
            now = dict(vars(peft_trainer.PeftTrainer))
            assert [name for name in raw if now[name] is not raw[name]] == []
    finally:
        if instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()
        vars(peft_trainer).clear()
        vars(peft_trainer).update(original)
