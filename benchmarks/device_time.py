# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""How true device time is, and what it costs a training loop.

For steps of about 150 ms and 10 ms of device work, in one process, arms interleaved: the loop
uninstrumented twice (the second is the control) and with full telemetry; and each step once more
with a wait after its call, which is what a device duration is compared with.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from opentelemetry.instrumentation.tunix import TunixInstrumentor, semconv
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tunix.sft import peft_trainer

WIDTH = 256
# Seconds of device work: steps of a block, pairs of blocks, throughput that has to remain.
CASES = {0.150: (8, 15, 0.98), 0.010: (60, 15, 0.95)}


class Loop:
    """A trainer whose steps keep the device busy for as long as it is told."""

    def __init__(self, seconds: float) -> None:
        rounds = 100
        while True:
            self._trainer = self._make(rounds)
            self.block(3)
            took = statistics.median(self.blocking(7))
            if 0.9 < took / seconds < 1.1 or rounds > 1_000_000:
                break
            rounds = max(1, round(rounds * seconds / took))

    def _make(self, rounds: int) -> peft_trainer.PeftTrainer:
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
            y = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ x), x)
            return jnp.mean(model(jax.lax.stop_gradient(y)) ** 2)

        config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=None)
        trainer = peft_trainer.PeftTrainer(model, optax.sgd(1e-3), config)
        trainer.is_managed_externally = True
        trainer.with_gen_model_input_fn(lambda batch: {"x": batch}).with_loss_fn(loss)
        self._batch = np.full((WIDTH, WIDTH), 1e-3, np.float32)
        return trainer

    def block(self, steps: int) -> float:
        """Seconds that the trainer needs for some steps of its own loop."""

        def data() -> Iterator[Any]:
            for _ in range(steps):
                yield self._batch

        start = time.perf_counter()
        self._trainer.train(data())
        return (time.perf_counter() - start) / steps

    def blocking(self, steps: int) -> list[float]:
        """Seconds of single steps that are waited for."""
        step, *_ = self._trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        took: list[float] = []
        for _ in range(steps):
            start = time.perf_counter()
            jax.block_until_ready(step(self._batch))
            took.append(time.perf_counter() - start)
        return took


def main() -> int:
    """Prints a table.

    Returns:
        1 when a figure is out of its bounds, else 0.
    """
    failed = 0
    for seconds, (steps, pairs, floor) in CASES.items():
        failed |= _compare(Loop(seconds), steps, pairs, floor)
    return failed


def _compare(loop: Loop, steps: int, pairs: int, floor: float) -> int:
    spans = InMemorySpanExporter()
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    meter_provider = MeterProvider([InMemoryMetricReader()])
    blocking: list[float] = []
    control: list[float] = []
    ratios: list[float] = []
    for _ in range(pairs):
        plain = loop.block(steps)
        control.append(plain / loop.block(steps))
        blocking += loop.blocking(3)
        TunixInstrumentor().instrument(
            tracer_provider=tracer_provider, meter_provider=meter_provider
        )
        ratios.append(plain / loop.block(steps))
        TunixInstrumentor().uninstrument()
    found = [s.attributes for s in spans.get_finished_spans() if s.name == semconv.MODEL_TRAIN]
    device = statistics.median(a[semconv.DEVICE_DURATION] for a in found)
    dispatch = statistics.median(a[semconv.DISPATCH_DURATION] for a in found)
    waited = statistics.median(blocking)
    ratio, spread = statistics.median(ratios), abs(1 - statistics.median(control))
    print(
        f"step {waited * 1e3:6.1f} ms waited for, {device * 1e3:6.1f} ms by its span "
        f"(ratio {device / waited:.3f}), dispatch {dispatch * 1e3:.2f} ms; "
        f"throughput {ratio:.3f} of uninstrumented, control {statistics.median(control):.3f}"
    )
    bad = abs(device / waited - 1) > 0.1 or ratio < floor - spread
    if waited > 0.1:
        bad |= dispatch > 0.1 * device
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
