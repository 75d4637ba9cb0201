# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What instrumentation adds to a train step of about 2 ms, on the training thread.

One process, one trainer, arms interleaved in short blocks; figures are differences of medians to
the uninstrumented arm, and the control arm, uninstrumented too, shows how far to trust them. Spans
and records go through batch processors to exporters that discard them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from opentelemetry.instrumentation import tunix
from opentelemetry.instrumentation.tunix import TunixInstrumentor
from opentelemetry.instrumentation.tunix.targets import TARGETS
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    LogRecordExporter,
    LogRecordExportResult,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

sys.path.insert(0, str(Path(__file__).parents[1] / "opentelemetry-instrumentation-tunix" / "tests"))
import toy_sft

ROUNDS, BLOCK = 40, 50
# Arm: wall and main-thread CPU in microseconds that it may add.
LIMITS = {
    "sampled out, span alone": (40.0, None),
    "recorded": (200.0, 140.0),
    "full": (300.0, 180.0),
}


class _Discard(SpanExporter, LogRecordExporter):
    def export(self, batch: Any) -> Any:
        return (
            SpanExportResult.SUCCESS
            if batch and hasattr(batch[0], "parent")
            else LogRecordExportResult.SUCCESS
        )

    def shutdown(self) -> None: ...

    def force_flush(self, *_: Any, **__: Any) -> bool:
        return True


def _providers(sampler: Any) -> dict[str, Any]:
    tracer_provider = TracerProvider(sampler=sampler)
    tracer_provider.add_span_processor(BatchSpanProcessor(_Discard(), max_queue_size=100_000))
    logger_provider = LoggerProvider()
    logger_provider.add_log_record_processor(
        BatchLogRecordProcessor(_Discard(), max_queue_size=100_000)
    )
    return {
        "tracer_provider": tracer_provider,
        "logger_provider": logger_provider,
        "meter_provider": MeterProvider([InMemoryMetricReader()]),
    }


class _Loop:
    """A trainer that can be run in blocks, and the times between its batches."""

    def __init__(self) -> None:
        self._run = toy_sft.Run(updates=None)
        self._run.trainer.is_managed_externally = True
        (self._batch,) = toy_sft.batches(1)

    def block(self) -> list[tuple[float, float]]:
        """Runs `BLOCK` steps; wall and CPU seconds of each but the first and the last."""
        marks: list[tuple[float, float]] = []

        def data() -> Iterator[Any]:
            for _ in range(BLOCK):
                marks.append((time.perf_counter(), time.thread_time()))
                yield self._batch

        self._run.train(data())
        return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks[1:])]


def main() -> int:
    """Prints a table.

    Returns:
        1 when an arm adds more than its limit, else 0.
    """
    off, on = _providers(ALWAYS_OFF), _providers(ALWAYS_ON)
    arms: dict[str, dict[str, Any] | None] = {
        "uninstrumented": None,
        "control": None,
        "sampled out, span alone": {**off, "device_time": False},
        "recorded": {**on, "device_time": False},
        "full": on,
    }
    loop = _Loop()
    loop.block()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    instrumentor = TunixInstrumentor()
    for _ in range(ROUNDS):
        for name, arguments in arms.items():
            span_alone = [t for t in TARGETS if t.method in ("train", "jit_train_and_eval_step")]
            targets = span_alone if name.endswith("span alone") else TARGETS
            if arguments is not None:
                with mock.patch.object(tunix, "TARGETS", targets):
                    instrumentor.instrument(**arguments)
            times[name] += loop.block()
            if arguments is not None:
                instrumentor.uninstrument()
    return _report(times)


def _report(times: dict[str, list[tuple[float, float]]]) -> int:
    medians = {
        name: tuple(statistics.median(column) * 1e6 for column in zip(*values, strict=True))
        for name, values in times.items()
    }
    base = medians["uninstrumented"]
    print(f"{'arm':<26}{'wall us':>10}{'cpu us':>10}{'+ wall':>10}{'+ cpu':>10}")
    exceeded = 0
    for name, (wall, cpu) in medians.items():
        added = (wall - base[0], cpu - base[1])
        print(f"{name:<26}{wall:>10.0f}{cpu:>10.0f}{added[0]:>+10.0f}{added[1]:>+10.0f}", end="")
        limits = LIMITS.get(name, (None, None))
        over = any(lim is not None and a > lim for a, lim in zip(added, limits, strict=True))
        print("  EXCEEDED" if over else "")
        exceeded |= over
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
