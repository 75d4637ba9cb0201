# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that are deleted or donated at any moment, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tunix

# Each array is logged and, at about the same time, deleted or donated by one of three threads or
# by this one; a fifth reads. Runs apart: what goes wrong here ends the process.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(tunix.__file__).parents[1])!r})
import logging, math, random, threading, time
import jax, jax.numpy as jnp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tunix.sft.metrics_logger import MetricsLogger

logging.disable(logging.WARNING)
VALUES = {{values}}
matrix = jnp.ones((64, 64))
donate = jax.jit(lambda a: a + 1, donate_argnums=0)

@jax.jit
def compute(matrix, value):
    return value + 0 * jax.lax.fori_loop(0, 30, lambda _, a: a @ a / 64, matrix)[0, 0]

reader = InMemoryMetricReader()
logger = MetricsLogger(meter_provider=MeterProvider([reader]))
alive, finished = [], threading.Event()

def destroy(seed):
    rng = random.Random(seed)
    while alive or not finished.is_set():
        try:
            array = alive.pop()
        except IndexError:
            time.sleep(0)
            continue
        try:
            array.delete() if rng.random() < 0.7 else donate(array)
        except RuntimeError:
            pass

def read():
    while not finished.is_set():
        if logger.metric_exists("", "m", "train"):
            logger.get_metric_history("", "m", "train")
        logger.peek_metric("", "m", "train")
        reader.get_metrics_data()

threads = [threading.Thread(target=destroy, args=(seed,)) for seed in range(3)]
threads.append(threading.Thread(target=read))
sys.setswitchinterval(1e-5)
for thread in threads:
    thread.start()
rng = random.Random(0)
for i in range(VALUES):
    array = compute(matrix, float(i))
    first = rng.random() < 0.5
    if first:
        alive.append(array)
    logger.log("", "m", array, "train", i)
    if not first:
        alive.append(array)
finished.set()
for thread in threads:
    thread.join()
history = logger.get_metric_history("", "m", "train")
assert len(history) == VALUES
assert all(math.isnan(value) or value == i for i, value in enumerate(history))
logger.close()
lost = sum(map(math.isnan, history))
counts = [
    point.value
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    for point in metric.data.data_points
    if metric.name == "tunix.training.nonfinite"
]
assert sum(counts) == lost > 0, (counts, lost)
print("survived")
"""


@pytest.mark.parametrize("values", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_destroyed_array_is_right_or_nan(run_script: Callable[..., str], values: int) -> None:
    """The process survives, each value is kept once, in order, and is right or NaN, and counts."""
    assert run_script(SCRIPT.replace("{values}", str(values))) == "survived\n"
