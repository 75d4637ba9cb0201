# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled train step of a trainer: one call is one micro-batch, from dispatch to completion.

The training thread does as little as can be: it starts the span, which has to be current during the
call, notes what will have changed by the end of it, and hands the loss to a watcher. Attributes,
measurements and the end of the span follow on the ticker's thread.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from . import compilation, context, facts, semconv
from .accounting import Bucket, Phase
from .device import WATCHERS, DeviceTime, Work, finish_soon
from .per_object import PerObject
from .signature import Signature, changes, signature_of
from .step_proxy import StepProxy, compiled_name, first_array, is_watched, role_of
from .telemetry import Telemetry, Voice, active, class_name, is_failure, report_failure

if TYPE_CHECKING:
    from contextvars import Token

    from .compilation import Compilation


class TrainStep(StepProxy):
    """The train step of a trainer: one call is one span."""

    def __init__(self, wrapped: Any, trainer: Any) -> None:
        super().__init__(wrapped)
        self._self_trainer = trainer
        self._self_function = compiled_name(wrapped)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the train step inside its span."""
        telemetry = active()
        if telemetry is None:
            return self.__wrapped__(*args, **kwargs)
        call = _Call(telemetry, self._self_trainer, self._self_function)
        call.begin(args)
        try:
            result = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            call.failed(error)
            raise
        call.dispatched(result, args)
        return result


class _Known:
    """What is known of a trainer beyond one call of its train step.

    Attributes:
        signature: The first batch's; None before the first call.
        told: Changes of which a recompilation was told already.
        ended: When the last call returned.
    """

    __slots__ = ("ended", "signature", "told")

    def __init__(self) -> None:
        self.signature: Signature | None = None
        self.told: set[tuple[str, ...]] = set()
        self.ended = 0


def _begin(before: _Known | None) -> _Known:
    return before or _Known()


_known: PerObject[_Known] = PerObject()


class _Call(Work):
    """One call of a train step."""

    __slots__ = (
        *("_before", "_context", "_counters", "_failed", "_first", "_function", "_known", "_run"),
        *("_span", "_telemetry", "_token", "_trainer", "_wall"),
    )

    def __init__(self, telemetry: Telemetry, trainer: Any, function: str | None) -> None:
        super().__init__()
        self._telemetry = telemetry
        self._trainer = trainer
        self._function = function
        self._failed = False
        self._first = True
        self._counters: tuple[Any, Any] | None = None
        self._known: _Known | None = None
        self._run: context.Run | None = None
        self._span: Span | None = None
        self._context: otel_context.Context | None = None
        self._token: Token[otel_context.Context] | None = None
        self._before: list[Compilation] | None = None

    # On the training thread; these never raise --------------------------------------------------

    def begin(self, args: tuple[Any, ...]) -> None:
        """Starts the span and makes it current."""
        telemetry = self._telemetry
        try:
            telemetry.begin()
            self._look_around(args)
        except Exception:
            report_failure("beginning a train step")
        self._before = compilation.begin_call()
        self._wall, self.started = time.time_ns(), time.perf_counter_ns()
        try:
            if "train" in telemetry.span_groups and telemetry.voice != Voice.ERRORS:
                self._span = context.start_step(telemetry, semconv.MODEL_TRAIN, self._wall)
                self._context = trace.set_span_in_context(self._span)
                self._token = otel_context.attach(self._context)
        except Exception:
            report_failure("starting tunix.model.train")

    def dispatched(self, result: Any, args: tuple[Any, ...]) -> None:
        """The call has returned; the device may still work."""
        self.returned = time.perf_counter_ns()
        try:
            self._after_call(args)
            recorded = self._span is not None and self._span.is_recording()
            if is_watched(self._telemetry, recorded=recorded):
                array = first_array(result)
                if array is not None and WATCHERS.watch(array, self):
                    return
            elif not recorded:
                return
        except Exception:
            report_failure("watching a train step")
        finish_soon(self)

    def failed(self, error: BaseException) -> None:
        """The call has raised."""
        self.returned = time.perf_counter_ns()
        self._failed = True
        try:
            self._after_call(())
            self._tell(None, error)
            self._measure(None, error)
            # In its place among the work before it, which may still go on.
            WATCHERS.follow(facts.devices_of(self._trainer), self)
        except Exception:
            report_failure("ending tunix.model.train")

    def _look_around(self, args: tuple[Any, ...]) -> None:
        trainer = self._trainer
        compilation.listen()
        self._run = run = context.current_run()
        self._known = known = _known.get(trainer) or _known.set(trainer, _begin)
        self._counters = trainer.train_steps, trainer.iter_steps
        self._first = known.signature is None
        if self._first:
            known.signature = signature_of(args[-1])
        if run is not None:
            if run.batch_shape is None:
                _note_batch_shape(run, args[-1])
            if _prepares_inputs(trainer) and is_watched(self._telemetry, recorded=False):
                _watch_inputs(args[-1], known.ended, run, role_of(trainer))

    def _after_call(self, args: tuple[Any, ...]) -> None:
        """Draws what was compiled in the call while its span is current, and ends that."""
        compiled = compilation.end_call(self._before)
        try:
            if self._known is not None:
                self._known.ended = self.returned
                if compiled:
                    self._read(self._known, compiled, args)
        except Exception:
            report_failure("reading the compilations of a train step")
        finally:
            if self._token is not None:
                otel_context.detach(self._token)

    def _read(self, known: _Known, compiled: list[Compilation], args: tuple[Any, ...]) -> None:
        for one in compiled:
            if one.function == self._function or compilation.is_long(one):
                compilation.draw(self._telemetry, one)
        self.not_before = min(self.started + compiled[-1].end_ns - self._wall, self.returned)
        if args and not self._first and any(one.function == self._function for one in compiled):
            self._compiled_again(known, args[-1])

    def _compiled_again(self, known: _Known, batch: Any) -> None:
        differences = tuple(changes(known.signature or {}, signature_of(batch)))
        if differences not in known.told:
            known.told.add(differences)
            attributes: dict[str, AttributeValue] = {
                semconv.JIT_FUNCTION: str(self._function),
                semconv.JIT_CHANGES: differences,
            }
            if self._counters is not None:
                attributes[semconv.TRAINING_STEP] = int(self._counters[0]) + 1
            if self._run is not None:
                attributes[semconv.RUN_ID] = self._run.id
            self._telemetry.log_event(semconv.RECOMPILATION, attributes, health=True)

    # On the ticker's thread ---------------------------------------------------------------------

    def finish(self, device: DeviceTime | None, error: BaseException | None) -> None:
        """Ends the span, measures and accounts for the call."""
        if not self._failed:
            self._tell(device, error)
            if device is not None:
                self._measure(device, error)
        if self._run is None:
            return
        account = self._run.account
        if device is None:
            account.unwatched(self.devices)
        else:
            account.device(
                self.devices,
                *device,
                bucket=Bucket.WASTED if self._failed or error else Bucket.PRODUCTIVE,
                phase=Phase.TRAIN,
                role=role_of(self._trainer),
            )

    def _tell(self, device: DeviceTime | None, error: BaseException | None) -> None:
        telemetry, span = self._telemetry, self._span
        if span is None and is_failure(error) and telemetry.voice == Voice.ERRORS:
            span = context.start_step(telemetry, semconv.MODEL_TRAIN, self._wall)
        if span is None:
            return
        try:
            if span.is_recording():
                span.set_attributes(self._attributes(device))
                telemetry.record_outcome(span, error)
        finally:
            span.end(self._wall + self._end(device) - self.started)

    def _end(self, device: DeviceTime | None) -> int:
        return self.returned if device is None else max(self.returned, device.ended)

    def _attributes(self, device: DeviceTime | None) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue] = {
            **context.identity(self._telemetry, self._run),
            semconv.ROLE: role_of(self._trainer),
            semconv.HOST_ONLY: device is None,
            semconv.DISPATCH_DURATION: (self.returned - self.started) / 1e9,
        }
        if self._counters is not None:
            updates, micro_steps = self._counters
            accumulation = self._trainer.config.get_with_default("gradient_accumulation_steps", 1)
            found[semconv.TRAINING_STEP] = int(updates) + 1
            found[semconv.TRAINING_MICRO_STEP] = int(micro_steps) % int(accumulation) + 1
        if device is not None:
            found[semconv.QUEUE_DURATION] = max(0, device.began - self.returned) / 1e9
            found[semconv.DEVICE_DURATION] = (device.ended - device.began) / 1e9
        return found

    def _measure(self, device: DeviceTime | None, error: BaseException | None) -> None:
        instruments = self._telemetry.instruments
        if instruments is None:
            return
        attributes: dict[str, AttributeValue] = {
            **self._telemetry.process_attributes,
            semconv.ROLE: role_of(self._trainer),
        }
        if error is not None and is_failure(error):
            attributes[semconv.ERROR_TYPE] = class_name(error)
        instruments.train_duration.record(
            (self._end(device) - self.started) / 1e9, attributes, self._context
        )
        if device is not None:
            instruments.train_device_duration.record(
                (device.ended - device.began) / 1e9, attributes, self._context
            )


class _Inputs(Work):
    """Device work that the trainer's `_prepare_inputs` has begun, such as a reference model's."""

    __slots__ = ("_role", "_run")

    def __init__(self, run: context.Run, role: str, started: int) -> None:
        super().__init__()
        self._run = run
        self._role = role
        self.started = started
        self.returned = time.perf_counter_ns()

    def finish(self, device: DeviceTime | None, error: BaseException | None) -> None:
        """Accounts for the work."""
        if device is not None:
            self._run.account.device(
                self.devices,
                *device,
                bucket=Bucket.PRODUCTIVE if error is None else Bucket.WASTED,
                phase=Phase.INPUTS,
                role=self._role,
            )


def _prepares_inputs(trainer: Any) -> bool:
    """Whether the trainer does work of its own to make a batch: DPO and distillation do."""
    base: Any = sys.modules["tunix.sft.peft_trainer"].PeftTrainer
    own = cast("Any", type(trainer))
    return own._prepare_inputs is not base._prepare_inputs


def _watch_inputs(batch: Any, since: int, run: context.Run, role: str) -> None:
    """Has the end of what a batch is still computed from noted, so that no step is charged."""
    for leaf in sys.modules["jax"].tree.leaves(batch):
        if first_array(leaf) is not None and not leaf.is_deleted() and not leaf.is_ready():
            WATCHERS.watch(leaf, _Inputs(run, role, since))


def _note_batch_shape(run: context.Run, batch: Any) -> None:
    """Tells the run the shape of its first batch."""
    run.batch_shape = facts.batch_shape(batch)
    if run.span is not None and run.batch_shape:
        run.span.set_attribute(semconv.RUN_BATCH_SHAPE, run.batch_shape)
