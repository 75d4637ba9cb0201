# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Data sets whose iteration is timed."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.instrumentation.tunix import data
from opentelemetry.instrumentation.tunix.accounting import Phase
from opentelemetry.instrumentation.tunix.data import TimedData


class Run:
    """Takes note of what is accounted for."""

    def __init__(self) -> None:
        self.account = self
        self.told: list[tuple[str, int, str]] = []

    def host(self, phase: str, began: int, ended: int, role: str) -> None:
        self.told.append((phase, ended - began, role))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr(data.time, "perf_counter_ns", lambda: now[0])
    return now


def test_each_wait_for_a_batch_is_accounted_for(clock: list[int]) -> None:
    """The end of the data as well; what takes no time is not worth remembering."""

    def batches() -> Any:
        for wait in (10, 200_000, 3_000_000):
            clock[0] += wait
            yield wait
        clock[0] += 500_000

    run = Run()
    assert list(TimedData(batches(), run, "actor")) == [10, 200_000, 3_000_000]
    assert run.told == [(Phase.DATA, wait, "actor") for wait in (200_000, 3_000_000, 500_000)]


def test_a_failing_data_set_raises_what_it_raised(clock: list[int]) -> None:
    """And the wait before it counts."""
    failure = RuntimeError("disk")

    def batches() -> Any:
        clock[0] += 1_000_000
        raise failure
        yield

    run = Run()
    with pytest.raises(RuntimeError) as caught:
        next(iter(TimedData(batches(), run, "trainer")))
    assert caught.value is failure
    assert len(run.told) == 1


def test_in_everything_else_it_is_the_data_set() -> None:
    """Type, length, items and truth."""
    timed = TimedData([1, 2], Run(), "trainer")
    assert isinstance(timed, list)
    assert (len(timed), timed[1], bool(timed)) == (2, 2, True)
    assert not TimedData([], Run(), "trainer")
    assert list(timed) == list(timed) == [1, 2]
