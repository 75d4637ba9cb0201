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
    from .logged_steps import LoggedSteps

_PARAMETERS: Final = ("metrics_prefix", "metric_name", "scalar_value", "mode", "step")

# Streams of live loggers, each with the telemetry that it was made for.
_streams: weakref.WeakKeyDictionary[Any, tuple[Telemetry, LoggedSteps]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


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
    entry = _streams.get(call.instance)
    if entry is not None:
        entry[1].finish()
    return result


def flush(telemetry: Telemetry) -> None:
    """Completes the open steps of every logger; values still on a device make late events."""
    for owner, steps in list(_streams.values()):
        if owner is telemetry:
            steps.flush()


def stop(telemetry: Telemetry) -> None:
    """Emits what has been logged so far and ends the thread that would have."""
    flush(telemetry)
    if _streams:
        from .ticker import TICKER

        TICKER.stop()


def _stream(call: Call) -> LoggedSteps:
    telemetry = call.telemetry
    entry = _streams.get(call.instance)
    if entry is None or entry[0] is not telemetry:
        # Not at import: most processes of an instrumented tree log nothing.
        from .logged_steps import LoggedSteps

        with _lock:
            entry = _streams.get(call.instance)
            if entry is None or entry[0] is not telemetry:
                gauges = not _emits_itself(call.instance, telemetry)
                entry = (telemetry, LoggedSteps(telemetry, gauges=gauges))
                _streams[call.instance] = entry
    return entry[1]


def _emits_itself(logger: Any, telemetry: Telemetry) -> bool:
    """Whether the library's logger sets gauges of its own: tunix-core's does, others may."""
    library = telemetry.library
    if library is not None and library.name == "tunix-core":
        return True
    return getattr(logger, "_otel_meter", None) is not None
