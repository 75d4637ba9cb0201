# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The account of a run's time: every second once for each mesh, whatever overlaps."""

from __future__ import annotations

import random

import pytest
from in_memory import Collected
from opentelemetry.instrumentation.tunix import semconv
from opentelemetry.instrumentation.tunix.accounting import Bucket, Phase, TimeAccount
from opentelemetry.instrumentation.tunix.config import Options
from opentelemetry.instrumentation.tunix.telemetry import Telemetry

SECOND = 10**9
A, B = frozenset({0}), frozenset({1, 2})


@pytest.fixture
def handler(collected: Collected) -> Telemetry:
    import jax

    jax.devices()  # a process speaks once its backend says which one it is
    return Telemetry(Options.load({}), **collected.providers())


def seconds(collected: Collected, mesh: int = 0) -> dict[str, float]:
    """Phase to seconds of one mesh."""
    return {
        point.attributes[semconv.TIME_PHASE]: round(point.value, 6)
        for point in collected.points(semconv.TIME)
        if point.attributes[semconv.MESH] == mesh
    }


class Account(TimeAccount):
    """In whole seconds from 100."""

    def __init__(self, handler: Telemetry) -> None:
        super().__init__(handler, 100 * SECOND)

    def busy(
        self, began: float, ended: float, devices: frozenset[int] | None = A, **kwargs: str
    ) -> None:
        told = {"bucket": Bucket.PRODUCTIVE, "phase": Phase.TRAIN, "role": "trainer", **kwargs}
        self.device(devices, round(began * SECOND), round(ended * SECOND), **told)

    def on_host(self, phase: str, began: float, ended: float) -> None:
        self.host(phase, round(began * SECOND), round(ended * SECOND), "trainer")

    def end(self, ended: float) -> None:
        self.close(round(ended * SECOND))


def test_gaps_are_idle_or_what_the_host_did(collected: Collected, handler: Telemetry) -> None:
    """Compile before the first step, load data and save between steps, nothing at the end."""
    account = Account(handler)
    account.on_host(Phase.COMPILE, 101, 105)
    account.busy(105, 107)
    account.on_host(Phase.DATA, 107.5, 108.5)
    account.on_host(Phase.CHECKPOINT, 109, 111)
    account.busy(111, 114)
    account.end(120)
    assert seconds(collected) == {
        Phase.COMPILE: 4,
        Phase.TRAIN: 5,
        Phase.DATA: 1,
        Phase.CHECKPOINT: 2,
        Phase.IDLE: 1 + 0.5 + 0.5 + 6,
    }


def test_what_the_host_does_while_the_device_works_costs_nothing(
    collected: Collected, handler: Telemetry
) -> None:
    """Data that is loaded in time is no overhead."""
    account = Account(handler)
    account.on_host(Phase.DATA, 101, 103)
    account.busy(100, 110)
    account.end(110)
    assert seconds(collected) == {Phase.TRAIN: 10}


def test_overlapping_phases_of_the_host_count_once(
    collected: Collected, handler: Telemetry
) -> None:
    """A compilation within a compilation, and one while data are loaded."""
    account = Account(handler)
    account.on_host(Phase.COMPILE, 102, 104)
    account.on_host(Phase.COMPILE, 101, 106)
    account.on_host(Phase.DATA, 100, 108)
    account.end(110)
    assert seconds(collected) == {Phase.COMPILE: 5, Phase.DATA: 3, Phase.IDLE: 2}


def test_each_mesh_has_all_of_the_time(collected: Collected, handler: Telemetry) -> None:
    """Also one that is used late: what was before is a gap of it like any other."""
    account = Account(handler)
    account.on_host(Phase.COMPILE, 100, 102)
    account.busy(102, 109)
    account.busy(108, 110, B, phase=Phase.EVAL, bucket=Bucket.OVERHEAD)
    account.end(110)
    assert seconds(collected, 0) == {Phase.COMPILE: 2, Phase.TRAIN: 7, Phase.IDLE: 1}
    assert seconds(collected, 1) == {Phase.COMPILE: 2, Phase.EVAL: 2, Phase.IDLE: 6}


def test_a_run_without_device_work_has_one_mesh(collected: Collected, handler: Telemetry) -> None:
    """Its time is not lost."""
    Account(handler).end(103)
    assert seconds(collected) == {Phase.IDLE: 3}


def test_work_of_unknown_devices_counts_for_the_first(
    collected: Collected, handler: Telemetry
) -> None:
    """A first step that fails tells of no device."""
    account = Account(handler)
    account.busy(100, 101, None, bucket=Bucket.WASTED)
    account.busy(101, 103)
    account.end(103)
    wasted = [
        point.value
        for point in collected.points(semconv.TIME)
        if point.attributes[semconv.TIME_BUCKET] == Bucket.WASTED
    ]
    assert wasted == [1]
    assert {p.attributes[semconv.MESH] for p in collected.points(semconv.TIME)} == {0}


def test_unwatched_work_keeps_its_devices_busy(collected: Collected, handler: Telemetry) -> None:
    """Until the next work of which more is known."""
    account = Account(handler)
    account.busy(100, 102)
    account.unwatched(A)
    account.busy(107, 108)
    account.end(108)
    assert seconds(collected) == {Phase.TRAIN: 8}


def test_idle_time_has_no_role_and_all_other_time_has_one(
    collected: Collected, handler: Telemetry
) -> None:
    """Nobody in particular idles."""
    account = Account(handler)
    account.busy(101, 102)
    account.end(103)
    for point in collected.points(semconv.TIME):
        idle = point.attributes[semconv.TIME_BUCKET] == Bucket.IDLE
        assert (semconv.ROLE in point.attributes) is not idle


def test_nothing_is_told_after_the_end(collected: Collected, handler: Telemetry) -> None:
    """Work that a failed run left on the device comes too late."""
    account = Account(handler)
    account.end(101)
    account.busy(100, 105)
    account.end(106)
    account.emit()
    assert seconds(collected) == {Phase.IDLE: 1}


@pytest.mark.parametrize("seed", range(20))
def test_any_history_adds_up(collected: Collected, handler: Telemetry, seed: int) -> None:
    """Random work and phases, also overlapping and out of order: the sum is the run's time."""
    rng = random.Random(seed)
    account = Account(handler)
    now = 100.0
    for _ in range(300):
        begin = now - rng.random()
        now += rng.random()
        if rng.random() < 0.5:
            account.busy(begin, now, rng.choice((A, B)))
        else:
            account.on_host(rng.choice((Phase.COMPILE, Phase.DATA, Phase.CHECKPOINT)), begin, now)
    account.end(now)
    for mesh in (0, 1):
        assert sum(seconds(collected, mesh).values()) == pytest.approx(now - 100, abs=1e-4)
