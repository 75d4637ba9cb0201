# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""An evaluation: its span covers the work of the device, which its steps tell of."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.util.types import AttributeValue

from . import compilation, context, semconv
from .accounting import Bucket, Phase
from .device import WATCHERS, DeviceTime, Work, finish_soon
from .patching import Call
from .step_proxy import StepProxy, compiled_name, first_array, is_watched, role_of
from .telemetry import Telemetry, active, report_failure


class Evaluation:
    """What one evaluation has cost so far.

    Attributes:
        telemetry: What to emit through.
        run: The run it belongs to.
        role: Whose evaluation it is.
    """

    def __init__(self, telemetry: Telemetry, trainer: Any) -> None:
        self.telemetry = telemetry
        self.run = context.current_run()
        self.role = role_of(trainer)
        self._nanoseconds = 0
        self._complete = is_watched(telemetry, recorded=True)

    def watch(self, call: Call) -> Call:
        """The call of `_run_eval` with its evaluation step in a proxy."""
        if len(call.args) != 3:
            self._complete = False
            return call
        trainer, data, step = call.args
        return call._replace(args=(trainer, data, EvalStep(step, self)))

    def add(self, device: DeviceTime | None) -> None:
        """Adds a step; None where its end is not known."""
        if device is None:
            self._complete = False
        else:
            self._nanoseconds += device.ended - device.began

    def attributes(self) -> dict[str, AttributeValue]:
        """What its span says of the device."""
        found: dict[str, AttributeValue] = {semconv.HOST_ONLY: not self._complete}
        if self._complete:
            found[semconv.DEVICE_DURATION] = self._nanoseconds / 1e9
        return found


class EvalStep(StepProxy):
    """The evaluation step for one evaluation, which it tells what the device did."""

    def __init__(self, wrapped: Any, evaluation: Evaluation) -> None:
        super().__init__(wrapped)
        self._self_evaluation = evaluation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the evaluation step."""
        evaluation: Evaluation = self._self_evaluation
        if active() is not evaluation.telemetry:
            return self.__wrapped__(*args, **kwargs)
        compilation.listen()
        before = compilation.begin_call()
        work = _Call(evaluation)
        try:
            result = self.__wrapped__(*args, **kwargs)
        finally:
            work.called(compilation.end_call(before), compiled_name(self.__wrapped__))
        work.dispatched(result)
        return result


class _Call(Work):
    """One call of an evaluation step."""

    __slots__ = ("_evaluation", "_wall")

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self._evaluation = evaluation
        self._wall, self.started = time.time_ns(), time.perf_counter_ns()

    def called(self, compiled: list[compilation.Compilation], function: str | None) -> None:
        """The call is over; never raises."""
        self.returned = time.perf_counter_ns()
        try:
            for one in compiled:
                if one.function == function or compilation.is_long(one):
                    compilation.draw(self._evaluation.telemetry, one)
            if compiled:
                ended = self.started + compiled[-1].end_ns - self._wall
                self.not_before = min(ended, self.returned)
        except Exception:
            report_failure("reading the compilations of an evaluation step")

    def dispatched(self, result: Any) -> None:
        """The call has returned its result; never raises."""
        try:
            if is_watched(self._evaluation.telemetry, recorded=True):
                array = first_array(result)
                if array is not None and WATCHERS.watch(array, self):
                    return
        except Exception:
            report_failure("watching an evaluation step")
        finish_soon(self)

    def finish(self, device: DeviceTime | None, error: BaseException | None) -> None:
        """Adds the work to the evaluation and to the time of the run."""
        evaluation = self._evaluation
        evaluation.add(device)
        if evaluation.run is None:
            return
        if device is None:
            evaluation.run.account.unwatched(self.devices)
        else:
            evaluation.run.account.device(
                self.devices,
                *device,
                bucket=Bucket.OVERHEAD if error is None else Bucket.WASTED,
                phase=Phase.EVAL,
                role=evaluation.role,
            )
