# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the library logs, as gauges and step events.

Each logger of the library gets a stream, which applies the rules of tunix-core's own logger to
every value: nothing waits for a device and nothing that OTLP cannot carry reaches the SDK. The
library's call comes first and its result is what the caller gets.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from .patching import Call
from .per_object import PerObject
from .telemetry import Telemetry, report_failure

if TYPE_CHECKING:
    from .context import Run
    from .logged_steps import LoggedSteps

_PARAMETERS: Final = ("metrics_prefix", "metric_name", "scalar_value", "mode", "step")


def log(call: Call) -> Any:
    """`MetricsLogger.log`: one number of one step."""
    result = call.proceed()
    try:
        _, *values = call.args
        if call.kwargs:
            values += [call.kwargs[name] for name in _PARAMETERS[len(values) :]]
        _stream(call).log(*values)
    except Exception:
        report_failure("reading a logged value")
    return result


def close(call: Call) -> Any:
    """`MetricsLogger.close`: the last step is complete."""
    result = call.proceed()
    _put_listeners_back()
    steps = _streams.get(call.instance)
    if steps is not None:
        try:
            steps.finish()
        except Exception:
            report_failure("emitting what a closed logger had logged")
    return result


def flush(telemetry: Telemetry, run: Run | None = None) -> None:
    """Completes open steps, of one run or all; values still on a device make late events."""
    for steps in _streams.values():
        if steps.telemetry is telemetry:
            try:
                steps.flush(run)
            except Exception:
                report_failure("emitting what a run had logged")


def stop(telemetry: Telemetry) -> None:
    """Emits what has been logged so far and ends the thread that would have."""
    ticker = sys.modules.get(f"{__package__}.ticker")
    if ticker is not None:
        ticker.TICKER.stop()
    flush(telemetry)


def _stream(call: Call) -> LoggedSteps:
    steps = _streams.get(call.instance)
    if steps is None or steps.telemetry is not call.telemetry:
        # Not at import: most processes of an instrumented tree log nothing.
        from .logged_steps import LoggedSteps

        steps = _streams.set(
            call.instance,
            lambda before: (
                before
                if before is not None and before.telemetry is call.telemetry
                else LoggedSteps(call.telemetry, gauges=not _emits_itself(call.instance))
            ),
        )
    return steps


def _put_listeners_back() -> None:
    """google-tunix takes all listeners of `jax.monitoring` out whenever a logger closes."""
    compilation = sys.modules.get(f"{__package__}.compilation")
    if compilation is not None:
        compilation.listen()


def _finish_soon(steps: LoggedSteps) -> None:
    """A logger is gone: its last step is complete."""
    from .ticker import TICKER

    # Not here: a finalizer runs anywhere, and what emits may take any lock.
    TICKER.schedule(steps.flush)


def _emits_itself(logger: Any) -> bool:
    """Whether the library's logger sets gauges of its own: tunix-core's does, others may."""
    return hasattr(logger, "event") or getattr(logger, "_otel_meter", None) is not None


_streams: Final[PerObject[LoggedSteps]] = PerObject(_finish_soon)
