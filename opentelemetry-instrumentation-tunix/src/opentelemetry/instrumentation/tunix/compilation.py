# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What JAX compiles, when and why.

JAX tells `jax.monitoring` of each phase of a compilation: tracing, lowering, compiling. All phases
of one compilation run on the thread whose call needs it, and the name of the function is all they
carry, so they are put together by thread and name.

Listeners are a global list that anyone may clear, and google-tunix clears it whenever a logger of
its closes. Ours are therefore looked for before each train step and put back.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import Any, Final, NamedTuple

from opentelemetry.util.types import AttributeValue

from . import context, semconv
from .accounting import Phase
from .telemetry import Telemetry, active, report_failure

_PHASES: Final = {
    "/jax/core/compile/jaxpr_trace_duration": semconv.JIT_TRACE_DURATION,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": semconv.JIT_LOWER_DURATION,
    "/jax/core/compile/backend_compile_duration": semconv.JIT_BACKEND_DURATION,
}
_LAST: Final = semconv.JIT_BACKEND_DURATION
_CACHE: Final = {
    "/jax/compilation_cache/cache_hits": "hit",
    "/jax/compilation_cache/cache_misses": "miss",
}
_LONG: Final = 0.1
_MOST_NAMES: Final = 100
_MOST_OPEN: Final = 256
_LONGEST_PAUSE: Final = 1.0
_DECORATED: Final = re.compile(r"^\w+\((.*)\)$")
"""`jit(f)` and `pmap(f)` in later phases; `f` while it is traced."""


class Compilation(NamedTuple):
    """One function compiled.

    Attributes:
        function: Its name.
        start_ns: Nanoseconds since the epoch.
        end_ns: Nanoseconds since the epoch.
        phases: Seconds of each phase by attribute name.
        cache: "hit" or "miss" of the persistent cache; None where it was not asked.
    """

    function: str
    start_ns: int
    end_ns: int
    phases: dict[str, float]
    cache: str | None

    @property
    def seconds(self) -> float:
        """From the beginning of the first phase to the end of the last."""
        return (self.end_ns - self.start_ns) / 1e9


class _Thread(threading.local):
    """What one thread is compiling."""

    def __init__(self) -> None:
        # Function to phase to (start, end) in seconds since the epoch.
        self.open: dict[str, dict[str, tuple[float, float]]] = {}
        self.cache: str | None = None
        self.taken: list[Compilation] | None = None


_thread = _Thread()
_names: set[str] = set()


def listen() -> None:
    """Makes sure that JAX tells of compilations; costs nothing where it does already."""
    monitoring = sys.modules.get("jax._src.monitoring")
    if monitoring is None:
        return
    try:
        # Membership, and before each train step: the lists are short and looked at for 0.2 us.
        if _on_phase not in monitoring._event_time_span_listeners:
            monitoring.register_event_time_span_listener(_on_phase)
        if _on_event not in monitoring._event_listeners:
            monitoring.register_event_listener(_on_event)
    except Exception:
        report_failure("listening to compilations")


def stop_listening() -> None:
    """Takes exactly our listeners out."""
    monitoring = sys.modules.get("jax._src.monitoring")
    if monitoring is None:
        return
    try:
        if _on_phase in monitoring._event_time_span_listeners:
            monitoring.unregister_event_time_span_listener(_on_phase)
        if _on_event in monitoring._event_listeners:
            monitoring.unregister_event_listener(_on_event)
    except Exception:
        report_failure("ending to listen to compilations")


def begin_call() -> list[Compilation] | None:
    """A call begins whose compilations are wanted.

    Returns:
        What to hand to `end_call`.
    """
    before, _thread.taken = _thread.taken, []
    return before


def end_call(before: list[Compilation] | None) -> list[Compilation]:
    """The call is over.

    Returns:
        What was compiled in it, in the order in which the compilations ended.
    """
    taken, _thread.taken = _thread.taken, before
    return taken or []


def draw(telemetry: Telemetry, compilation: Compilation) -> None:
    """Emits `tunix.jit.compile`, a child of what is current."""
    attributes: dict[str, AttributeValue] = {
        semconv.JIT_FUNCTION: compilation.function,
        **compilation.phases,
    }
    if compilation.cache is not None:
        attributes[semconv.JIT_CACHE] = compilation.cache
    context.past_span(
        telemetry,
        semconv.JIT_COMPILE,
        lambda: attributes,
        start_ns=compilation.start_ns,
        end_ns=compilation.end_ns,
    )


def is_long(compilation: Compilation) -> bool:
    """Whether it is worth a span of its own, whatever function it is."""
    return compilation.seconds >= _LONG


# What a listener raises would reach the call that compiles.


def _on_event(event: str, **_: Any) -> None:
    answer = _CACHE.get(event)
    if answer is not None:
        _thread.cache = answer


def _on_phase(event: str, start_time: float, end_time: float, **metadata: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    try:
        _take(phase, start_time, end_time, str(metadata.get("fun_name", "unknown")))
    except Exception:
        report_failure("reading a compilation")


def _take(phase: str, start: float, end: float, name: str) -> None:
    decorated = _DECORATED.match(name)
    function = name if decorated is None else decorated[1]
    if len(_thread.open) >= _MOST_OPEN:
        _thread.open.clear()
    phases = _thread.open.setdefault(function, {})
    phases[phase] = (start, end)
    if phase != _LAST:
        return
    del _thread.open[function]
    cache, _thread.cache = _thread.cache, None
    telemetry = active()
    if telemetry is None:
        return
    start, phases = _joined(phases)
    compilation = Compilation(function, int(start * 1e9), int(end * 1e9), phases, cache)
    _count(telemetry, compilation)
    _account(compilation)
    if _thread.taken is not None:
        _thread.taken.append(compilation)
    elif is_long(compilation):
        draw(telemetry, compilation)


def _joined(phases: dict[str, tuple[float, float]]) -> tuple[float, dict[str, float]]:
    """Start and seconds of the phases that belong to the compilation that has just ended.

    A function may have been traced or lowered at any time before without being compiled.
    """
    start = phases[_LAST][0]
    seconds: dict[str, float] = {}
    for phase in reversed(_PHASES.values()):
        begin, end = phases.get(phase, (start, start))
        if start - end > _LONGEST_PAUSE:
            break
        seconds[phase] = end - begin
        start = min(start, begin)
    return start, seconds


def _count(telemetry: Telemetry, compilation: Compilation) -> None:
    instruments = telemetry.instruments
    if instruments is None:
        return
    function = compilation.function
    if function not in _names and len(_names) >= _MOST_NAMES:
        function = "other"
    _names.add(function)
    attributes: dict[str, AttributeValue] = {
        **telemetry.process_attributes,
        semconv.JIT_FUNCTION: function,
    }
    if compilation.cache is not None:
        attributes[semconv.JIT_CACHE] = compilation.cache
    instruments.compilations.add(1, attributes)
    instruments.compile_duration.record(compilation.seconds, attributes)


def _account(compilation: Compilation) -> None:
    run = context.current_run()
    if run is not None:
        # From the clock of the phases, which may be set, to the one that only goes on.
        ended = time.perf_counter_ns() - max(0, time.time_ns() - compilation.end_ns)
        began = ended - (compilation.end_ns - compilation.start_ns)
        run.account.host(Phase.COMPILE, began, ended, run.role)
