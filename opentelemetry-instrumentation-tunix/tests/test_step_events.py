# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Steps are gathered whole, once each, whoever writes them and in whatever order."""

from __future__ import annotations

import math
import random
import sys

import pytest
from opentelemetry.instrumentation.tunix import step_events
from opentelemetry.instrumentation.tunix._series import Origin
from opentelemetry.instrumentation.tunix.step_events import Step, StepCollector

MAIN = 1


class Log:
    """A collector, and what came out of it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._collector = StepCollector(self.steps.append)
        self.flush = self._collector.flush

    def write(
        self, step: int, key: str, value: float = 1.0, *, thread: int = MAIN, mode: str = "train"
    ) -> None:
        self._collector.add("", mode, key, f"tunix.{key}", step, value, Origin(thread, None, 0))

    def summary(self) -> list[tuple[int, list[str], bool]]:
        return [(s.step, sorted(s.values), s.late) for s in self.steps]


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_step_is_complete_when_the_next_one_begins(log: Log) -> None:
    """Every number of it, in one event; the last one when flushed."""
    for step in (1, 2):
        log.write(step, "loss", step / 2)
        log.write(step, "lr", 0.1)
    assert [(s.step, s.values) for s in log.steps] == [(1, {"tunix.loss": 0.5, "tunix.lr": 0.1})]
    log.flush()
    assert log.steps[1].values == {"tunix.loss": 1.0, "tunix.lr": 0.1}
    log.flush()
    assert len(log.steps) == 2


def test_a_repeated_key_begins_a_second_occurrence(log: Log) -> None:
    """Two evaluations at one step are two events, neither of them late."""
    for _ in range(2):
        log.write(0, "loss", mode="eval")
        log.write(0, "perplexity", mode="eval")
    log.flush()
    both = ["tunix.loss", "tunix.perplexity"]
    assert log.summary() == [(0, both, False), (0, both, False)]


def test_a_step_waits_for_every_thread_that_wrote_to_it(log: Log) -> None:
    """The slower thread's number is in the event."""
    log.write(1, "loss", thread=1)
    log.write(1, "reward", thread=2)
    log.write(2, "loss", thread=1)
    assert log.steps == []
    log.write(1, "kl", thread=2)
    log.write(2, "reward", thread=2)
    assert log.summary() == [(1, ["tunix.kl", "tunix.loss", "tunix.reward"], False)]


def test_a_value_after_the_event_makes_one_more_marked_late(log: Log) -> None:
    """Nothing is lost, and nobody counts the step twice."""
    log.write(1, "loss")
    log.write(2, "loss")
    log.write(1, "reward", thread=2)
    log.flush()
    assert log.summary() == [
        (1, ["tunix.loss"], False),
        (2, ["tunix.loss"], False),
        (1, ["tunix.reward"], True),
    ]


def test_going_back_is_a_step_like_any_other(log: Log) -> None:
    """Steps 10, 11, 5 are three steps in this order."""
    for step in (10, 11, 5):
        log.write(step, "loss")
    log.flush()
    assert [(s.step, s.late) for s in log.steps] == [(10, False), (11, False), (5, False)]


def test_modes_are_not_mixed(log: Log) -> None:
    """An evaluation between two updates completes neither."""
    log.write(1, "loss")
    log.write(1, "loss", mode="eval")
    log.write(1, "lr")
    log.flush()
    assert [(s.mode, sorted(s.values)) for s in log.steps] == [
        ("train", ["tunix.loss", "tunix.lr"]),
        ("eval", ["tunix.loss"]),
    ]


def test_nonfinite_values_are_named_and_not_valued(log: Log) -> None:
    """A NaN is in no body, and the event says whose it was."""
    log.write(1, "loss", math.nan)
    log.write(1, "perplexity", math.inf)
    log.write(1, "lr", 0.1)
    log.flush()
    assert log.steps[0].values == {"tunix.lr": 0.1}
    assert log.steps[0].nonfinite == ["loss", "perplexity"]


def test_keys_that_share_a_gauge_name_stay_apart(log: Log) -> None:
    """The second one carries its key."""
    collector = StepCollector(log.steps.append)
    collector.add("", "train", "a/b", "tunix.a.b", 1, 1.0, Origin(MAIN, None, 0))
    collector.add("", "train", "a b", "tunix.a.b", 1, 2.0, Origin(MAIN, None, 0))
    collector.flush()
    assert log.steps[0].values == {"tunix.a.b": 1.0, "tunix.a.b[a b]": 2.0}


def test_threads_that_write_once_do_not_pile_up(log: Log) -> None:
    """A pool that makes a thread for each step leaves no step open for ever."""
    for step in range(10_000):
        log.write(step, "loss", thread=step)
    assert 10_000 - len(log.steps) <= step_events._OPEN
    log.flush()
    assert [s.step for s in log.steps] == list(range(10_000))
    series = log._collector._series["", "train"]
    assert not series.open
    assert not series.at


def test_a_long_run_is_remembered_in_bounded_space(log: Log) -> None:
    """What was sent is forgotten after a while."""
    for step in range(20_000):
        log.write(step, "loss")
    log.steps.clear()
    series = log._collector._series["", "train"]
    assert len(series.sent) <= step_events._REMEMBERED
    assert sys.getsizeof(series.sent) < 500_000


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_gives_each_step_once_with_every_value(log: Log, seed: int) -> None:
    """N steps are N events that are not late, and no value is lost or doubled."""
    rng = random.Random(seed)
    writers = {t: [(s, f"k{t}.{k}") for s in range(30) for k in range(2)] for t in range(4)}
    while writers:
        thread = rng.choice(list(writers))
        step, key = writers[thread].pop(0)
        log.write(step, key, thread=thread)
        if not writers[thread]:
            del writers[thread]
    log.flush()
    prompt = [s.step for s in log.steps if not s.late]
    assert sorted(prompt) == list(range(30))
    values = [(s.step, name) for s in log.steps for name in s.values]
    assert len(values) == len(set(values)) == 4 * 30 * 2
