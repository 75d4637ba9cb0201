# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""When values go out: those that wait for the device, in log order, from many threads."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from value_cases import donated, pending

from tunix.sft import _gauges, _history
from tunix.sft.metrics_logger import MetricsLogger

Logger = MetricsLogger
Make = Callable[..., MetricsLogger]
Warnings = Callable[[str], list[str]]


# Values on the device ----------------------------------------------------------------------------


def test_pending_array_does_not_block_log(logger: Logger, exported: Any, fake_array: Any) -> None:
    """Nothing waits for it, and it goes out by the first call after it is computed."""
    array = fake_array(1.5)
    logger.log("", "loss", array, "train", 3)
    assert exported.points() == {}
    assert logger.peek_metric("", "loss", "train") is None
    assert logger.metric_exists("", "loss", "train")
    assert (array.waits, array.copies) == (0, 1)
    array.finish()
    logger.log("", "other", 1.0, "eval", 1)
    assert exported.value("tunix.training.loss") == 1.5
    assert exported.value("tunix.training.step", tunix__training__mode="train") == 3
    assert logger.peek_metric("", "loss", "train") == 1.5
    assert array.waits == 0


def test_value_and_step_go_out_in_log_order(logger: Logger, exported: Any, fake_array: Any) -> None:
    """A value behind a pending one of its prefix and mode waits for it; other modes do not."""
    first, third = fake_array(1.0), fake_array(3.0)
    logger.log("", "loss", first, "train", 1)
    logger.log("", "loss", 2.0, "train", 2)
    logger.log("", "loss", third, "train", 3)
    logger.log("", "loss", 9.0, "eval", 9)
    eval_mode, train = {"tunix__training__mode": "eval"}, {"tunix__training__mode": "train"}
    assert exported.value("tunix.training.loss", **eval_mode) == 9.0
    assert exported.value("tunix.training.loss", **train) is None
    third.finish()  # out of order
    logger.log("", "loss", 9.5, "eval", 10)
    assert exported.value("tunix.training.loss", **train) is None
    first.finish()
    assert logger.get_metric("", "loss", "eval") == 9.25
    assert exported.value("tunix.training.loss", **train) == 3.0
    assert exported.value("tunix.training.step", **train) == 3
    assert logger.get_metric_history("", "loss", "train").tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("read", ["get_metric", "get_metric_history"])
def test_reading_waits_for_this_metric_alone(logger: Logger, fake_array: Any, read: str) -> None:
    """Another metric on the device is left to its own time."""
    other, mine = fake_array(1.0), fake_array(2.0)
    logger.log("", "other", other, "train", 1)
    logger.log("", "mine", 4.0, "train", 1)
    logger.log("", "mine", mine, "train", 1)
    getattr(logger, read)("", "mine", "train")
    assert (mine.waits, other.waits) == (1, 0)
    assert logger.get_metric("", "mine", "train") == 3.0


def test_close_waits_and_emits_what_is_left(logger: Logger, exported: Any, fake_array: Any) -> None:
    """After that no gauge any more; history and reads go on; a second call changes nothing."""
    array = fake_array(1.5)
    logger.log("", "loss", array, "train", 3)
    logger.close()
    assert exported.value("tunix.training.loss") == 1.5
    logger.log("", "loss", 0.5, "train", 4)
    logger.log("", "loss", math.nan, "train", 5)
    late = fake_array(2.0)
    logger.log("", "late", late, "train", 6)
    logger.close()
    assert logger.get_metric_history("", "loss", "train")[:2].tolist() == [1.5, 0.5]
    assert logger.get_metric("", "late", "train") == 2.0
    assert exported.value("tunix.training.loss") == 1.5
    assert exported.value("tunix.late") is None
    assert exported.value("tunix.training.nonfinite") is None


@pytest.mark.parametrize("computed", [False, True])
def test_array_deleted_while_it_waits_is_nan(
    logger: Logger, exported: Any, warnings_of: Warnings, fake_array: Any, computed: bool
) -> None:
    """Counted each time, warned about once; the metric goes on."""
    arrays = [fake_array(1.0), fake_array(2.0)]
    for step, array in enumerate(arrays):
        logger.log("", "loss", array, "train", step)
    for array in arrays:
        array.done = computed
        array.delete()
    logger.log("", "loss", 0.5, "train", 3)
    kept = logger.get_metric_history("", "loss", "train")
    assert [math.isnan(kept[0]), math.isnan(kept[1]), kept[2]] == [True, True, 0.5]
    assert exported.value("tunix.training.nonfinite") == 2
    assert exported.value("tunix.training.loss") == 0.5
    (said,) = warnings_of("tunix")
    assert "deleted or donated" in said


def test_array_donated_right_after_log_is_right_or_nan(logger: Logger, exported: Any) -> None:
    """With real arrays, each still computed when it is given away."""
    for step in range(20):
        array = pending()
        logger.log("", "m", array, "train", step)
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    kept = logger.get_metric_history("", "m", "train")
    assert len(kept) == 20
    assert all(value == 1.5 or math.isnan(value) for value in kept)
    lost = sum(math.isnan(value) for value in kept)
    assert exported.value("tunix.training.nonfinite") == (lost or None)


def test_computation_that_fails_is_nan_and_told(
    logger: Logger, exported: Any, warnings_of: Warnings, fake_array: Any
) -> None:
    """An error on the device reaches nobody through the logger."""
    array = fake_array(1.0)
    logger.log("", "loss", array, "train", 1)
    array.finish(FloatingPointError("on the device"))
    assert math.isnan(logger.get_metric("", "loss", "train"))
    assert exported.value("tunix.training.nonfinite") == 1
    (said,) = warnings_of("tunix")
    assert "FloatingPointError" in said


def test_transfer_guard_is_no_obstacle(logger: Logger) -> None:
    """Only explicit transfers, and no computation on the device."""
    arrays = [jnp.float32(1.5), jnp.asarray([2.5]), jnp.asarray([1.0, 2.0]), pending()]
    with jax.transfer_guard("disallow"):
        for array in arrays:
            logger.log("", "m", array, "train", 1)
        kept = logger.get_metric_history("", "m", "train")
    assert (kept[0], kept[1], kept[2].tolist(), kept[3]) == (1.5, 2.5, [1.0, 2.0], 1.5)


def test_no_device_array_outlives_its_value(logger: Logger) -> None:
    """Ten thousand logged arrays leave none behind."""
    gc.collect()
    before = len(jax.live_arrays())
    for step in range(2_000):
        logger.log("", "m", jnp.float32(step) + 0, "train", step)
        logger.log("", "d", {"a": jnp.float32(step)}, "train", step)
    logger.get_metric("", "m", "train")
    assert len(jax.live_arrays()) <= before + 2


def test_mean_reads_each_number_once(logger: Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the whole history at every step of a progress bar."""
    terms: list[float] = []
    term = _history.History._term
    monkeypatch.setattr(
        _history.History, "_term", staticmethod(lambda n: terms.append(n) or term(n))
    )
    for step in range(3_000):
        logger.log("", "m", 1.0, "train", step)
        logger.get_metric("", "m", "train")
    assert len(terms) == 3_000


def test_waiting_values_are_bounded(
    make_logger: Make, fake_array: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that never answers, the oldest value is given up as NaN."""
    monkeypatch.setattr(_gauges, "MAX_WAITING", 8)
    logger = make_logger()
    arrays = [fake_array(float(step)) for step in range(20)]
    for step, array in enumerate(arrays):
        logger.log("", "m", array, "train", step)
    for array in arrays:
        array.finish()
    kept = logger.get_metric_history("", "m", "train")
    assert [math.isnan(value) for value in kept[:12]] == [True] * 12
    assert kept[12:].tolist() == [float(step) for step in range(12, 20)]


# Threads -----------------------------------------------------------------------------------------


def test_sixteen_threads_and_a_reader_lose_nothing(
    logger: Logger, exported: Any, warnings_of: Warnings
) -> None:
    """Exact counts, each instrument created once, while everything is read and collected."""
    threads, values = 16, 2_000
    failed: list[BaseException] = []
    done = threading.Event()
    start = threading.Barrier(threads + 2)

    def write(thread: int) -> None:
        rng = random.Random(thread)
        start.wait()
        for step in range(values):
            prefix, name = f"p{rng.randrange(3)}", f"m{rng.randrange(50)}"
            number = math.nan if step % 500 == 499 else 1.0
            logger.log(prefix, name, number, "train", step)

    def read(job: Callable[[], object]) -> None:
        start.wait()
        while not done.wait(0.005):
            job()

    def reads() -> None:
        for name in ("m0", "m1"):
            if logger.metric_exists("p0", name, "train"):
                assert logger.get_metric_history("p0", name, "train").dtype == float
                logger.get_metric("p0", name, "train")

    def guarded(job: Callable[[Any], None], argument: Any) -> None:
        try:
            job(argument)
        except BaseException as error:
            failed.append(error)
            start.abort()

    writers = [threading.Thread(target=guarded, args=(write, t)) for t in range(threads)]
    readers = [threading.Thread(target=guarded, args=(read, j)) for j in (exported.points, reads)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not failed
    names = [(f"p{p}", f"m{m}") for p in range(3) for m in range(50)]
    kept = sum(len(logger.get_metric_history(*name, "train")) for name in names)
    assert kept == threads * values
    points = exported.points()
    assert sum(v for _, v in points["tunix.training.nonfinite"]) == threads * values / 500
    assert set(points) >= {"tunix.training.nonfinite"}
    assert not warnings_of("opentelemetry")
    assert not warnings_of("tunix")


def test_values_logged_in_any_order_are_each_kept_once(
    logger: Logger, exported: Any, fake_array: Any
) -> None:
    """Eight threads, every step once in random order, some still on the device."""
    steps = list(range(400))
    random.Random(0).shuffle(steps)
    arrays = {step: fake_array(float(step)) for step in steps[::4]}

    def write(mine: list[int]) -> None:
        for step in mine:
            logger.log("rollout", "reward", arrays.get(step, float(step)), "train", step)

    threads = [threading.Thread(target=write, args=(steps[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logger.close()
    kept = logger.get_metric_history("rollout", "reward", "train")
    assert sorted(kept.tolist()) == [float(step) for step in range(400)]
    assert exported.value("tunix.reward") == kept[-1] == exported.value("tunix.training.step")


def test_donated_array_is_told_once_for_each_key(logger: Logger, warnings_of: Warnings) -> None:
    """However often it happens."""
    for step in range(3):
        for name in ("a", "b"):
            logger.log("", name, donated(), "train", step)
    assert len(warnings_of("tunix")) == 2
