"""The stream of one logger: its gauges, and an event for each complete step."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import numpy as np
from opentelemetry._logs import get_logger_provider

from . import _process, semconv
from ._gauges import GaugeStream
from ._scalars import read, read_step
from ._series import Logged, Origin, utf8
from .context import Run, current_run
from .step_events import Step, StepCollector
from .telemetry import Telemetry, Voice
from .ticker import TICKER

_UNDECIDED_STEPS: Final = 4096
_MOST_NOTED: Final = 4096
_NOTED: Final = "values have been noted"
# What cannot change between being noted and being read.
_IMMUTABLE: Final = frozenset({float, int, np.float32, np.float64})
_PATIENCE: Final = 5.0
_INT64: Final = range(-(2**63), 2**63)


class LoggedSteps:
    """Values of one logger on their way to gauges and step events.

    The training thread only notes values; everything else happens on the ticker's thread, a moment
    later, and at once at the end of a run, when the logger closes and at exit. Doing it in the loop
    would cost more than everything else together.

    Complete steps are queued while the stream holds its lock and emitted when it does not: a log
    processor may run anything. One thread sends at a time, so events keep their order.

    Attributes:
        telemetry: What it emits through.

    Args:
        telemetry: What to emit through.
        gauges: Whether gauges are set; step events do not depend on it.
    """

    def __init__(self, telemetry: Telemetry, *, gauges: bool) -> None:
        library = telemetry.library
        self.telemetry = telemetry
        self._seen: object = None
        self._scheduled = False
        self._held = False
        self._silent = False
        # Steps wait here until it is known whether this process speaks.
        self._complete: deque[Step] = deque(maxlen=_UNDECIDED_STEPS)
        self._stream = GaugeStream(
            "" if library is None else library.version,
            meter_provider=telemetry.meter_provider,
            all_processes=telemetry.options.processes == "all",
            enabled=gauges,
            paced=True,
            observe=self._observe if telemetry.options.step_events else None,
        )
        self._start()
        _process.register(self)

    def _start(self) -> None:
        self._noted: deque[tuple[Any, Any, Any, Any, Any, Origin]] = deque()
        self._collector = StepCollector(self._complete.append)
        # Reentrant: a signal handler, a finalizer or a log processor may log at any moment.
        self._taking = threading.RLock()
        self._collecting = threading.RLock()
        self._sending = threading.RLock()

    def log(self, prefix: Any, name: Any, value: Any, mode: Any, step: Any) -> None:
        """Takes one value; never waits and never raises."""
        if self._silent:
            return
        if type(value) not in _IMMUTABLE:
            value = read(value)
        if type(step) is not int:
            step = read_step(step)
        self._noted.append((prefix, name, value, mode, step, Origin.here()))
        if not self._scheduled:
            self._scheduled = True
            _process.hold(self, _NOTED)
            # Exit hooks run last-in first-out, and a provider that was made meanwhile has its own.
            _process.finish_before_the_rest()
            TICKER.schedule(self.tick)
        elif len(self._noted) > _MOST_NOTED:
            self._take(wait=0.0)

    def _take(self, wait: float = _PATIENCE) -> None:
        """Passes on what was noted, in that order; one thread at a time."""
        if not self._taking.acquire(timeout=wait):
            return
        try:
            for _ in range(len(self._noted)):
                *value, origin = self._noted.popleft()
                self._stream.log(*value, origin=origin)
        except IndexError:  # a signal handler has come in between and taken the rest
            pass
        finally:
            self._taking.release()

    def tick(self) -> None:
        """Emits what is known; waits for nothing."""
        # First, so that a value which comes meanwhile is not forgotten.
        self._scheduled = False
        self._take()
        self._stream.emit_waiting()
        if not self._noted:
            _process.release(self, _NOTED)
        self._send(wait=0.0)

    def flush(self, run: Run | None = None) -> None:
        """Emits what is known and completes the open steps, of one run or all, with it.

        Waits for no device; only, a few seconds at most, for a thread that is emitting just now.
        """
        self._take()
        self._stream.emit_waiting()
        with self._collecting:
            self._collector.flush(lambda context: run is None or current_run(context) is run)
        self._send()
        with self._collecting:
            # A step of another run, or one that is undecided, may wait still.
            self._held = bool(self._complete) or self._collector.has_open_steps()
            if not self._held:
                _process.release(self, self)

    def finish(self) -> None:
        """Completes the open steps once their values are known."""
        self._take()
        self._stream.finish()
        self.flush()
        if self._complete and _process.last_process_index() == 0:
            self._send(decided=True)

    def after_fork_in_child(self) -> None:
        """Falls silent in the child: it shares the parent's identity."""
        self._silent = True
        self._complete.clear()
        self._scheduled = False
        self._held = False
        self._start()

    def _observe(self, logged: Logged) -> None:
        step = logged.step
        if logged.number is None or step is None or step not in _INT64 or self._silent:
            return
        provider = get_logger_provider()
        if provider is not self._seen:
            # A provider registers its shutdown when it is made; what is open goes out before.
            self._seen = provider
            _process.finish_before_the_rest()
        if not self._held:
            self._held = True
            _process.hold(self, self)
        series = logged.series
        with self._collecting:
            self._collector.add(
                utf8(series.prefix),
                utf8(series.mode),
                utf8(series.name),
                series.gauge_name,
                step,
                logged.number,
                logged.origin,
            )

    def _send(self, *, decided: bool = False, wait: float = _PATIENCE) -> None:
        if not decided and self.telemetry.voice == Voice.UNDECIDED:
            return
        if not self._sending.acquire(timeout=wait):
            return
        try:
            # What is there now and no more: a log processor may log a metric for each event.
            for _ in range(len(self._complete)):
                self._emit(self._complete.popleft())
        finally:
            self._sending.release()

    def _emit(self, step: Step) -> None:
        attributes: dict[str, Any] = {
            semconv.TRAINING_STEP: step.step,
            semconv.TRAINING_MODE: step.mode,
        }
        if step.prefix:
            attributes[semconv.METRICS_PREFIX] = step.prefix
        run = current_run(step.context)
        if run is not None:
            attributes[semconv.RUN_ID] = run.id
        if step.nonfinite:
            attributes[semconv.NONFINITE] = step.nonfinite
        if step.late:
            attributes[semconv.LATE] = True
        self.telemetry.log_event(
            semconv.STEP_COMPLETED,
            attributes,
            body=step.values,
            context=step.context,
            time_ns=step.time_ns,
        )
