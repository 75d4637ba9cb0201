# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Spans of supervised training: run, train step, evaluation, checkpoint.

Nothing that JAX traces is wrapped: the trainer's `_train_step` runs once, while it is compiled. The
callable that the trainer calls for each micro-batch is what `jit_train_and_eval_step` returns, so
the proxy goes around that.

Every Python process of an instrumented tree imports this module: what only those need that train
is imported by the functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from opentelemetry.util.types import AttributeValue

from . import context, metrics, semconv
from .patching import Call
from .telemetry import report_failure

# What `train` of trainers and of agentic learners calls its first parameter.
_DATA: Final = ("train_ds", "train_dataset")


def train(call: Call) -> Any:
    """`PeftTrainer.train`: the run, where it is the outermost."""
    return _train(call, message=True)


def train_learner(call: Call) -> Any:
    """`train` of a learner; what rewards and environments raise may quote a prompt."""
    return _train(call, message=False)


def _train(call: Call, *, message: bool) -> Any:
    from . import compilation, device, facts
    from .step_proxy import role_of

    telemetry = call.telemetry
    compilation.listen()
    with context.run(
        telemetry,
        lambda: facts.of_run(call.instance, telemetry.library),
        lambda run: metrics.flush(telemetry, run),
        message=message,
        role=role_of(call.instance),
    ):
        try:
            return _timed(call).proceed()
        finally:
            # Its steps are done, and children end before what they are part of.
            device.WATCHERS.catch_up()


def _timed(call: Call) -> Call:
    """The call with its data set in a proxy that times how long the loop waits for it."""
    from .data import TimedData
    from .step_proxy import role_of

    run = context.current_run()
    if run is None:
        return call
    owner, *rest = call.args
    if rest and rest[0] is not None:
        rest[0] = TimedData(rest[0], run, role_of(owner))
    named = {
        name: TimedData(value, run, role_of(owner)) if name in _DATA else value
        for name, value in call.kwargs.items()
    }
    return call._replace(args=(owner, *rest), kwargs=named)


def jit_train_and_eval_step(call: Call) -> Any:
    """`PeftTrainer.jit_train_and_eval_step`: the train step comes back in a proxy."""
    from .train_step import TrainStep

    steps = call.proceed()
    # A release may return something else one day; then there are no step spans, and no harm.
    if type(steps) is not tuple or not steps or type(steps[0]) is TrainStep:  # pyright: ignore[reportUnknownArgumentType]
        return steps  # pyright: ignore[reportUnknownVariableType]
    first, *rest = steps  # pyright: ignore[reportUnknownVariableType]
    return (TrainStep(first, call.instance), *rest)


def run_eval(call: Call) -> Any:
    """`PeftTrainer._run_eval`: it ends with reading the loss, so its span covers the device too."""
    from .device import WATCHERS
    from .evaluation import Evaluation

    trainer, telemetry = call.instance, call.telemetry
    evaluation = Evaluation(telemetry, trainer)
    with context.span(telemetry, semconv.MODEL_EVAL, lambda: _updates_done(trainer)) as span:
        try:
            return evaluation.watch(_timed(call)).proceed()
        finally:
            WATCHERS.catch_up()
            if span is not None:
                span.set_attributes(evaluation.attributes())


def save_checkpoint(call: Call) -> Any:
    """`CheckpointManager.save`: called after every update, a span only where it saved or failed."""

    def step(saved: Any) -> int | None:
        return int(call.args[1] if len(call.args) > 1 else call.kwargs["step"]) if saved else None

    return _checkpoint(call, semconv.CHECKPOINT_SAVE, step)


def restore_checkpoint(call: Call) -> Any:
    """`CheckpointManager.maybe_restore`: a span only where it found a checkpoint or failed."""

    def step(restored: Any) -> int | None:
        step, _metadata = restored
        return int(step) or None

    return _checkpoint(call, semconv.CHECKPOINT_RESTORE, step)


def _checkpoint(call: Call, name: str, step_of: Callable[[Any], int | None]) -> Any:
    start, began = time.time_ns(), time.perf_counter_ns()
    try:
        result = call.proceed()
    except BaseException as error:
        _tell_of_checkpoint(call, name, {}, start, began, error)
        raise
    try:
        step = step_of(result)
        if step is not None:
            _tell_of_checkpoint(call, name, {semconv.TRAINING_STEP: step}, start, began, None)
    except Exception:
        report_failure(f"reading the step of {name}")
    return result


def _tell_of_checkpoint(
    call: Call,
    name: str,
    attributes: dict[str, AttributeValue],
    start: int,
    began: int,
    error: BaseException | None,
) -> None:
    try:
        run = context.current_run()
        if run is not None:
            from .accounting import Phase

            run.account.host(Phase.CHECKPOINT, began, time.perf_counter_ns(), run.role)
        context.past_span(call.telemetry, name, lambda: attributes, start_ns=start, error=error)
    except Exception:
        report_failure(f"telling of {name}")


def stop() -> None:
    """Ends the threads and listeners that training has needed."""
    if f"{__package__}.device" in sys.modules:
        from . import compilation, device

        compilation.stop_listening()
        device.WATCHERS.stop()


def _updates_done(trainer: Any) -> dict[str, AttributeValue]:
    return {semconv.TRAINING_STEP: int(trainer.train_steps)}
