# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Spans of supervised training: run, train step, evaluation, checkpoint.

Nothing that JAX traces is wrapped: the trainer's `_train_step` runs once, while it is compiled. The
callable that the trainer calls for each micro-batch is what `jit_train_and_eval_step` returns, so
the proxy goes around that.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import wrapt
from opentelemetry.util.types import AttributeValue

from . import context, metrics, semconv
from .patching import Call
from .telemetry import active, report_failure


def train(call: Call) -> Any:
    """`PeftTrainer.train`: the run, where it is the outermost."""
    return _train(call, message=True)


def train_learner(call: Call) -> Any:
    """`train` of a learner; what rewards and environments raise may quote a prompt."""
    return _train(call, message=False)


def _train(call: Call, *, message: bool) -> Any:
    from . import facts  # only processes that train need it

    telemetry = call.telemetry
    with context.run(
        telemetry,
        lambda: facts.of_run(call.instance, telemetry.library),
        lambda run: metrics.flush(telemetry, run),
        message=message,
    ):
        return call.proceed()


def jit_train_and_eval_step(call: Call) -> Any:
    """`PeftTrainer.jit_train_and_eval_step`: the train step comes back in a proxy."""
    steps = call.proceed()
    # A release may return something else one day; then there are no step spans, and no harm.
    if type(steps) is not tuple or not steps or type(steps[0]) is TrainStep:  # pyright: ignore[reportUnknownArgumentType]
        return steps  # pyright: ignore[reportUnknownVariableType]
    first, *rest = steps  # pyright: ignore[reportUnknownVariableType]
    return (TrainStep(first, call.instance), *rest)


if TYPE_CHECKING:
    # wrapt carries types from release 2 on only, and then generic ones that release 1 cannot
    # subscript.
    class _Proxy:
        __wrapped__: Any

        def __init__(self, wrapped: Any) -> None: ...
else:
    _Proxy = wrapt.ObjectProxy


class TrainStep(_Proxy):
    """The train step of a trainer: one call is one micro-batch and one span.

    A proxy, because the trainer reads attributes of the callable (`func`, `jitted_fn`, `lower`),
    which differ between releases. Copies and pickles are those of the wrapped callable.
    """

    def __init__(self, wrapped: Any, trainer: Any) -> None:
        super().__init__(wrapped)
        self._self_trainer = trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the train step inside its span."""
        telemetry = active()
        if telemetry is None:
            return self.__wrapped__(*args, **kwargs)
        trainer = self._self_trainer
        _note_batch_shape(args)
        with context.step_span(telemetry, semconv.MODEL_TRAIN, lambda: _step_attributes(trainer)):
            return self.__wrapped__(*args, **kwargs)

    def __copy__(self) -> Any:
        """A shallow copy of the wrapped callable."""
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of the wrapped callable."""
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the wrapped callable."""
        return _itself, (self.__wrapped__,)


def _itself(wrapped: Any) -> Any:
    return wrapped


def run_eval(call: Call) -> Any:
    """`PeftTrainer._run_eval`: it ends with reading the loss, so its span covers the device too."""
    trainer = call.instance
    with context.span(call.telemetry, semconv.MODEL_EVAL, lambda: _updates_done(trainer)):
        return call.proceed()


def save_checkpoint(call: Call) -> Any:
    """`CheckpointManager.save`: called after every update, a span only where it saved or failed."""
    start = time.time_ns()
    try:
        saved = call.proceed()
    except BaseException as error:
        _checkpoint_span(call, start, error)
        raise
    if saved:
        _checkpoint_span(call, start, None)
    return saved


def _checkpoint_span(call: Call, start: int, error: BaseException | None) -> None:
    scope = context.span(
        call.telemetry, semconv.CHECKPOINT_SAVE, lambda: _saved_step(call), start_time=start
    )
    scope.__enter__()
    scope.__exit__(None if error is None else type(error), error, None)


def _saved_step(call: Call) -> dict[str, AttributeValue]:
    step = call.args[0] if call.args else call.kwargs["step"]
    return {semconv.TRAINING_STEP: int(step)}


def _step_attributes(trainer: Any) -> dict[str, AttributeValue]:
    accumulation = trainer.config.get_with_default("gradient_accumulation_steps", 1)
    return {
        semconv.TRAINING_STEP: int(trainer.train_steps) + 1,
        semconv.TRAINING_MICRO_STEP: int(trainer.iter_steps) % int(accumulation) + 1,
        # The call returns while the device still works.
        semconv.HOST_ONLY: True,
    }


def _updates_done(trainer: Any) -> dict[str, AttributeValue]:
    return {semconv.TRAINING_STEP: int(trainer.train_steps)}


def _note_batch_shape(args: tuple[Any, ...]) -> None:
    """Tells the run the shape of its first batch, the last argument in every release."""
    run = context.current_run()
    if run is None or run.batch_shape is not None:
        return
    run.batch_shape = ()
    from . import facts

    try:
        run.batch_shape = facts.batch_shape(args[-1])
        if run.span is not None and run.batch_shape:
            run.span.set_attribute(semconv.RUN_BATCH_SHAPE, run.batch_shape)
    except Exception:
        report_failure("reading the shape of a batch")
