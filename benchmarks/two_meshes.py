# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Device time of two meshes that work at once, one on jobs ten times as long as the other's.

Each mesh is one device and has a thread that keeps it busy. Under telemetry two jobs are with each
mesh at any time; what its spans say is compared with the same jobs one by one, each waited for,
while the other mesh is as busy.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from typing import Any

# Before JAX is imported: as many devices as meshes, and no job on more than one core.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from opentelemetry.instrumentation.tunix import TunixInstrumentor, semconv
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tunix.sft import peft_trainer

WIDTH = 64
SECONDS = (0.25, 0.025)
LIMIT = 0.15
ROUNDS = 5


class Job:
    """A train step on a device of its own."""

    def __init__(self, device: Any, seconds: float, prefix: str) -> None:
        self._device = device
        self._prefix = prefix
        rounds = 1000
        while True:
            self._make(rounds)
            self.alone()
            took = statistics.median(self.alone() for _ in range(5))
            if 0.9 < took / seconds < 1.1:
                break
            rounds = round(rounds * seconds / took)

    def _make(self, rounds: int) -> None:
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        nnx.update(model, jax.device_put(nnx.state(model), self._device))

        def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
            y = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ x), x)
            return jnp.mean(model(jax.lax.stop_gradient(y)) ** 2)

        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=10**9, max_steps=None, metrics_prefix=self._prefix
        )
        self._trainer = peft_trainer.PeftTrainer(model, optax.sgd(1e-3), config)
        self._trainer.with_gen_model_input_fn(lambda batch: {"x": batch}).with_loss_fn(loss)
        batch = np.full((WIDTH, WIDTH), 1e-3, np.float32)
        self._batch = jax.device_put(batch, self._device)

    def step(self) -> Any:
        """The compiled step, through the instrumentation where it is on."""
        step, *_ = self._trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        return lambda: step(self._batch)

    def alone(self) -> float:
        """Seconds of one job that is waited for."""
        step = self.step()
        start = time.perf_counter()
        jax.block_until_ready(step())
        return time.perf_counter() - start


def main() -> int:
    """Prints a line for each mesh.

    Returns:
        1 when a mesh's device time is further off than the limit, else 0.
    """
    jobs = [
        Job(device, seconds, prefix)
        for device, seconds, prefix in zip(jax.devices(), SECONDS, ("long", "short"), strict=True)
    ]
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    waited: dict[str, list[float]] = {"long": [], "short": []}
    for _ in range(ROUNDS):
        alone = zip(jobs, waited.values(), strict=True)
        _at_once([(_one_by_one, job.step(), seconds) for job, seconds in alone])
        TunixInstrumentor().instrument(tracer_provider=provider)
        _at_once([(_two_at_a_time, job.step(), None) for job in jobs])
        TunixInstrumentor().uninstrument()
    exceeded = False
    for name, seconds in waited.items():
        found = [
            span.attributes[semconv.DEVICE_DURATION]
            for span in spans.get_finished_spans()
            if span.attributes.get(semconv.ROLE) == name
        ]
        ratio = statistics.median(found) / statistics.median(seconds)
        exceeded |= abs(ratio - 1) > LIMIT
        print(
            f"{name:<6} waited for {statistics.median(seconds) * 1e3:6.1f} ms, "
            f"by its spans {statistics.median(found) * 1e3:6.1f} ms, ratio {ratio:.3f}"
        )
    return int(exceeded)


def _at_once(loops: list[tuple[Any, Any, Any]]) -> None:
    until = time.perf_counter() + SECONDS[0] * 6
    threads = [threading.Thread(target=work, args=(step, until, out)) for work, step, out in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _one_by_one(step: Any, until: float, seconds: list[float]) -> None:
    while time.perf_counter() < until:
        start = time.perf_counter()
        jax.block_until_ready(step())
        seconds.append(time.perf_counter() - start)


def _two_at_a_time(step: Any, until: float, _: None) -> None:
    before = step()
    while time.perf_counter() < until:
        after = step()
        jax.block_until_ready(before)
        before = after
    jax.block_until_ready(before)


if __name__ == "__main__":
    sys.exit(main())
