# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The store of one metric: order, memory, means, and threads that need no lock."""

from __future__ import annotations

import math
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tunix.sft._history import GeometricHistory, History
from tunix.sft.metrics_logger import MetricsLogger


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after microseconds, so that what can interleave does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_together(*jobs: Callable[[], None]) -> None:
    failed: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        try:
            start.wait()
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_number_takes_eight_bytes() -> None:
    """Also at the peak, while the array grows; 16 would be the limit."""
    logger = MetricsLogger()
    logger.log("", "loss", 0.5, "train", 0)
    count = 100_000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for step in range(count):
        logger.log("", "loss", step + 0.5, "train", step)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert 8 * count <= peak < 12 * count


@pytest.mark.parametrize("count", [1, 1_022, 1_023, 1_024, 1_025, 5_000])
def test_running_sum_takes_in_every_number_once(count: int) -> None:
    """Whether it was brought up to date by a read, or every 1,024 numbers by itself."""
    read, unread = History(), History()
    for value in range(count):
        read.add(value)
        unread.add(value)
        assert read.mean() == value / 2
    assert unread.mean() == (count - 1) / 2


def test_mean_leaves_out_what_is_no_number() -> None:
    """Text counts for nothing, an integer beyond float64's precision for its nearest float."""
    history = History()
    history.add(1.0)
    history.add_object("text", None)
    history.add_object(2**60 + 1, float(2**60))
    assert history.mean() == (1.0 + 2**60) / 2
    assert history.values().tolist() == [1.0, "text", 2**60 + 1]


def test_mean_of_no_number_is_nan() -> None:
    """There is nothing to average, and nothing to raise about."""
    history = History()
    history.add_object("text", None)
    assert math.isnan(history.mean())


@pytest.mark.parametrize("position", range(3))
def test_one_nan_makes_the_mean_nan(position: int) -> None:
    """Also beside an object, whose place among the numbers is held by NaN."""
    history = History()
    history.add_object("text", None)
    for index in range(3):
        history.add(math.nan if index == position else 1.0)
    assert math.isnan(history.mean())


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([2.0, 8.0], 4.0),
        ([math.inf, 2.0], math.inf),
        ([0.0, 2.0], 0.0),
        ([0.0, math.inf], math.nan),
        ([-1.0, 2.0], math.nan),
        ([math.nan, 2.0], math.nan),
        ([sys.float_info.max] * 3, sys.float_info.max),
    ],
)
def test_geometric_mean(values: list[float], mean: float) -> None:
    """As numpy's exp of the mean of logarithms, without its warnings."""
    history = GeometricHistory()
    for value in values:
        history.add(value)
    assert history.mean() == pytest.approx(mean, rel=1e-9, nan_ok=True)


def test_values_is_a_copy_that_may_be_written_to() -> None:
    """The history is the logger's own."""
    history = History()
    history.add(1.0)
    history.values()[0] = 9.0
    assert history.values().tolist() == [1.0]


def test_arrays_of_one_shape_stay_objects() -> None:
    """Each is one entry; numpy would rather make a matrix of them."""
    history = History()
    for _ in range(2):
        history.add_object(np.ones(3), None)
    values = history.values()
    assert (values.shape, values.dtype) == ((2,), object)
    assert values[1].tolist() == [1.0, 1.0, 1.0]


def test_copy_is_independent() -> None:
    """Of both kinds, with the sums."""
    history = GeometricHistory()
    history.add(2.0)
    history.add_object(10**400, math.inf)
    new = history.copy()
    new.add(3.0)
    assert type(new) is GeometricHistory
    assert (len(history), len(new)) == (2, 3)
    assert new.mean() == math.inf
    assert new.values()[1] == 10**400


@pytest.mark.usefixtures("quick_switches")
def test_numbers_of_many_threads_are_all_kept_without_a_lock() -> None:
    """Eight writers, a reader of means, a copier, and objects in between."""
    history, lock, count = History(), threading.Lock(), 4_000

    def write() -> None:
        for _ in range(count):
            history.add(1.0)

    def objects() -> None:
        for index in range(count // 10):
            with lock:
                history.add_object(f"object {index}", None)

    def read() -> None:
        for _ in range(200):
            with lock:
                assert math.isnan(mean := history.mean()) or mean == 1.0
                values: Any = history.values()
            assert all(v == 1.0 or isinstance(v, str) for v in values.tolist())

    run_together(*[write] * 8, objects, read)
    values = history.values().tolist()
    assert values.count(1.0) == 8 * count
    assert [v for v in values if v != 1.0] == [f"object {i}" for i in range(count // 10)]
    assert history.mean() == 1.0


@pytest.mark.usefixtures("quick_switches")
def test_logger_that_emits_nothing_loses_nothing() -> None:
    """The way without a lock, as a whole."""
    logger = MetricsLogger()
    logger.log("", "loss", 0.0, "train", 0)

    def write() -> None:
        for step in range(5_000):
            logger.log("", "loss", 1.0, "train", step)

    run_together(*[write] * 8)
    assert len(logger.get_metric_history("", "loss", "train")) == 40_001
    assert logger.get_metric("", "loss", "train") == 40_000 / 40_001
