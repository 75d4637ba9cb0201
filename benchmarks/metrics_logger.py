# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What `MetricsLogger` of tunix-core costs a training loop.

Times are medians of interleaved rounds and judged as ratios within one run: the machine may be
slow or busy, and is so for both arms. Memory is counted by tracemalloc and by JAX itself.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tunix.sft.metrics_logger import MetricsLogger

ROUNDS: Final = 15
CALLS: Final = 5_000
VALUES: Final = 1_000_000
ARRAYS: Final = 10_000
BUSY_SECONDS: Final = 0.2

Result = tuple[str, float, float, str]
"""What was measured, its value, the limit, and the figures behind it."""


def medians(arms: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median of what each arm returns, the arms interleaved; a first round is thrown away."""
    measured: dict[str, list[float]] = {name: [] for name in arms}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds + 1):
            for name, arm in arms.items():
                value = arm()
                if index:
                    measured[name].append(value)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in measured.items()}


def arm_of(log: Callable[..., object], *arguments: Any) -> Callable[[], float]:
    """An arm: `log` called with the arguments and a step; seconds a call."""

    def arm() -> float:
        start = time.perf_counter()
        for step in range(CALLS):
            log(*arguments, step)
        return (time.perf_counter() - start) / CALLS

    return arm


def compare(what: str, limit: float, **arms: Callable[[], float]) -> Result:
    """The ratio of the second arm to the first; further ones are shown only."""
    times = medians(arms)
    base, tested, *_ = times.values()
    figures = ", ".join(f"{name} {seconds * 1e6:.2f} µs" for name, seconds in times.items())
    return what, tested / base, limit, figures


LOGGED: Final = ("actor", "loss", 0.5, "train")


def without_sdk() -> Result:
    """`log()` of a float without a provider, against a function that only keeps the value.

    Both are called the same way and keep it under prefix, name and mode.
    """
    lists: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)

    def append(prefix: str, name: str, value: float, mode: str, step: int) -> None:
        del step
        lists[prefix, name, mode].append(value)

    return compare(
        "log() without SDK / appending to a dict of lists",
        5.0,
        append=arm_of(append, *LOGGED),
        log=arm_of(MetricsLogger().log, *LOGGED),
    )


def with_sdk() -> Result:
    """`log()` of a float against the two gauges it sets, with the same attributes."""
    logger = MetricsLogger(meter_provider=MeterProvider([InMemoryMetricReader()]))
    meter = MeterProvider([InMemoryMetricReader()]).get_meter("bare")
    loss, steps = meter.create_gauge("tunix.training.loss"), meter.create_gauge("step")

    def gauges(prefix: str, name: str, value: float, mode: str, step: int) -> None:
        del name
        attributes = {"tunix.metrics.prefix": prefix, "tunix.training.mode": mode}
        loss.set(value, attributes)
        steps.set(step, attributes)

    return compare(
        "log() with SDK / two bare gauge.set",
        1.5,
        gauges=arm_of(gauges, *LOGGED),
        log=arm_of(logger.log, *LOGGED),
    )


def busy_work(results: int) -> tuple[Callable[[], list[jax.Array]], float]:
    """A dispatch that keeps the device busy for `BUSY_SECONDS`, and how long it really does.

    One dispatch returns all the results: after a few dozen in flight JAX waits by itself.
    """
    ones = jnp.ones((128, 128))

    @jax.jit
    def work(rounds: int) -> list[jax.Array]:
        last = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ ones), ones)
        return [last[0, index] for index in range(results)]

    jax.block_until_ready(work(1))
    rounds = 100
    while True:
        start = time.perf_counter()
        jax.block_until_ready(work(rounds))
        taken = time.perf_counter() - start
        if taken > BUSY_SECONDS:
            return functools.partial(work, rounds), taken
        rounds = int(rounds * min(10.0, 1.3 * BUSY_SECONDS / taken)) + 1


def pending() -> Result:
    """`log()` of an array that is not computed yet, while the device works on it."""
    burst = 100
    dispatch, taken = busy_work(burst)
    loggers = [
        MetricsLogger(meter_provider=MeterProvider([InMemoryMetricReader()])) for _ in range(2)
    ]

    def arm(on_device: bool) -> Callable[[], float]:
        def run() -> float:
            logger = loggers[on_device]
            results = dispatch()
            values = results if on_device else [0.5] * burst
            times = [time.perf_counter()]
            for step, value in enumerate(values):
                logger.log("actor", "loss", value, "train", step)
                times.append(time.perf_counter())
            if results[0].is_ready():
                raise RuntimeError("the device was not busy long enough")
            logger.get_metric("actor", "loss", "train")
            jax.block_until_ready(results)
            # The "device" is the same cores: a call that is interrupted for it says nothing.
            return statistics.median(map(operator.sub, times[1:], times))

        return run

    return compare(
        f"log() of a pending array / of a float, device busy {taken * 1e3:.0f} ms",
        3.0,
        float=arm(False),
        pending=arm(True),
    )


def reading() -> tuple[Result, Result]:
    """`get_metric` at a thousand and at a million values, and the memory of the million."""
    logger = MetricsLogger()
    for step in range(1_000):
        logger.log("", "few", step * 0.1, "train", step)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for step in range(VALUES):
        logger.log("", "many", step * 0.1, "train", step)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (after - before) / VALUES
    return compare(
        f"get_metric at {VALUES:,} values / at 1,000",
        2.0,
        few=arm_of(lambda _: logger.get_metric("", "few", "train")),
        many=arm_of(lambda _: logger.get_metric("", "many", "train")),
    ), (f"bytes a number at {VALUES:,}", size, 16.0, f"{after - before:,} bytes")


def live_arrays() -> Result:
    """Device arrays that are alive while many are logged, against those alive before."""
    logger = MetricsLogger(meter_provider=MeterProvider([InMemoryMetricReader()]))
    step_result = jax.jit(lambda step: step * 0.5)
    step_result(0).block_until_ready()
    before, most = len(jax.live_arrays()), 0
    for step in range(ARRAYS):
        logger.log("", "loss", step_result(step), "train", step)
        if step % 100 == 99:
            most = max(most, len(jax.live_arrays()) - before)
    history = logger.get_metric_history("", "loss", "train")
    if history.tolist() != [step * 0.5 for step in range(ARRAYS)]:
        raise RuntimeError("values were lost")
    kept = len(jax.live_arrays()) - before
    # The device may be some steps behind; what has been read is not held.
    figures = f"{kept} after the last was read"
    return f"live arrays over {ARRAYS:,} logged ones, most", float(max(most, kept)), 100.0, figures


def main() -> int:
    """Prints each figure with its limit.

    Returns:
        1 when a limit is exceeded, else 0.
    """
    jax.devices()  # without a backend nobody knows which process this is, and gauges wait
    results = [without_sdk(), with_sdk(), pending(), *reading(), live_arrays()]
    width = max(len(what) for what, *_ in results)
    print(f"{'':<{width}}{'value':>9}{'limit':>8}")
    for what, value, limit, figures in results:
        verdict = "kept" if value <= limit else "EXCEEDED"
        print(f"{what:<{width}}{value:>9.2f}{limit:>8.1f}  {verdict:<9} {figures}")
    return int(any(value > limit for _, value, limit, _ in results))


if __name__ == "__main__":
    sys.exit(main())
