# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the library logs, as gauges and step events.

Each logger of the library gets a stream, which applies the rules of tunix-core's own logger to
every value: nothing waits for a device and nothing that OTLP cannot carry reaches the SDK. The
library's call comes first and its result is what the caller gets.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from .patching import Call
from .telemetry import Telemetry, report_failure

if TYPE_CHECKING:
    from .context import Run
    from .logged_steps import LoggedSteps

_PARAMETERS: Final = ("metrics_prefix", "metric_name", "scalar_value", "mode", "step")

# Streams of live loggers by identity (a logger may be unhashable, or equal to another one), each
# with the telemetry that it was made for.
_streams: dict[int, tuple[Telemetry, LoggedSteps]] = {}
_immortal: list[Any] = []
# Reentrant: a signal handler or a finalizer may log at any moment.
_lock = threading.RLock()


def log(call: Call) -> Any:
    """`MetricsLogger.log`: one number of one step."""
    result = call.proceed()
    try:
        values = call.args
        if len(values) < len(_PARAMETERS):
            values += tuple(call.kwargs[name] for name in _PARAMETERS[len(values) :])
        _stream(call).log(*values)
    except Exception:
        report_failure("reading a logged value")
    return result


def close(call: Call) -> Any:
    """`MetricsLogger.close`: the last step is complete."""
    result = call.proceed()
    entry = _streams.get(id(call.instance))
    if entry is not None:
        try:
            entry[1].finish()
        except Exception:
            report_failure("emitting what a closed logger had logged")
    return result


def flush(telemetry: Telemetry, run: Run | None = None) -> None:
    """Completes open steps, of one run or all; values still on a device make late events."""
    with _lock:
        entries = list(_streams.values())
    for owner, steps in entries:
        if owner is telemetry:
            try:
                steps.flush(run)
            except Exception:
                report_failure("emitting what a run had logged")


def stop(telemetry: Telemetry) -> None:
    """Emits what has been logged so far and ends the thread that would have."""
    flush(telemetry)
    if _streams:
        from .ticker import TICKER

        TICKER.stop()


def _stream(call: Call) -> LoggedSteps:
    entry = _streams.get(id(call.instance))
    if entry is None or entry[0] is not call.telemetry:
        with _lock:
            entry = _streams.get(id(call.instance))
            if entry is None or entry[0] is not call.telemetry:
                entry = _open_stream(call)
    return entry[1]


def _open_stream(call: Call) -> tuple[Telemetry, LoggedSteps]:
    # Not at import: most processes of an instrumented tree log nothing.
    from .logged_steps import LoggedSteps

    logger, key = call.instance, id(call.instance)
    if key not in _streams:
        # A logger that takes no weak reference is kept, and its identity with it.
        try:
            weakref.finalize(logger, _streams.pop, key, None).atexit = False
        except TypeError:
            _immortal.append(logger)
    entry = (call.telemetry, LoggedSteps(call.telemetry, gauges=not _emits_itself(logger)))
    _streams[key] = entry
    return entry


def _emits_itself(logger: Any) -> bool:
    """Whether the library's logger sets gauges of its own: tunix-core's does, others may."""
    return hasattr(logger, "event") or getattr(logger, "_otel_meter", None) is not None
