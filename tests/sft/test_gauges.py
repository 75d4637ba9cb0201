# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The stream of values as other code builds on it: stores, the observer, deferral."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import context as otel_context

from tunix.sft import _process
from tunix.sft._gauges import GaugeStream, Logged, Series

MODE = "train"


class ListStore:
    """Keeps what it is given."""

    def __init__(self, series: Series) -> None:
        self.values: list[Any] = []

    def add(self, number: float) -> None:
        self.values.append(number)

    def add_object(self, kept: object, number: float | None) -> None:
        self.values.append((kept, number))


@pytest.fixture
def seen() -> list[Logged]:
    return []


@pytest.fixture
def stream(exported: Any, seen: list[Logged]) -> GaugeStream:
    return GaugeStream(
        "1.2.3", meter_provider=exported.provider, keep=ListStore, observe=seen.append
    )


def stored(stream: GaugeStream, name: str, prefix: str = "") -> list[Any]:
    series = stream.find(prefix, name, MODE)
    assert series is not None
    return series.store.values  # type: ignore[attr-defined]


# The observer ------------------------------------------------------------------------------------


def test_observer_sees_each_value_with_all_that_is_known(
    stream: GaugeStream, seen: list[Logged]
) -> None:
    """Names, gauge, step, value, the thread and the context of the call."""
    context = otel_context.set_value("key", "value")
    token = otel_context.attach(context)
    stream.log("actor", "rewards/score mean", 1.5, MODE, 7)
    otel_context.detach(token)
    assert len(seen) == 1
    logged = seen[0]
    series = logged.series
    assert (series.prefix, series.name, series.mode) == ("actor", "rewards/score mean", MODE)
    assert series.gauge_name == "tunix.rewards.score.mean"
    assert (logged.step, logged.kept, logged.number) == (7, 1.5, 1.5)
    assert logged.origin.thread == threading.get_ident()
    assert logged.origin.context == context


def test_observer_gets_log_order_within_prefix_and_mode(
    stream: GaugeStream, seen: list[Logged], fake_array: Any
) -> None:
    """What is known at once waits for what was logged before it; other prefixes do not."""
    loss = fake_array(1.0)
    stream.log("actor", "loss", loss, MODE, 1)
    stream.log("actor", "lr", 0.1, MODE, 1)
    stream.log("actor", "text", "x", MODE, 1)
    stream.log("critic", "loss", 2.0, MODE, 1)
    assert [(v.series.prefix, v.series.name) for v in seen] == [("critic", "loss")]
    assert stored(stream, "lr", "actor") == [0.1]
    loss.finish()
    stream.poll()
    assert [v.kept for v in seen] == [2.0, 1.0, 0.1, "x"]
    assert [v.number for v in seen] == [2.0, 1.0, 0.1, None]


def test_observed_thread_and_context_are_those_of_the_log_call(
    stream: GaugeStream, seen: list[Logged], fake_array: Any
) -> None:
    """A value that waited is passed on by another thread, in the context it was logged in."""
    array = fake_array(1.0)
    token = otel_context.attach(otel_context.set_value("key", "value"))
    stream.log("", "loss", array, MODE, 1)
    otel_context.detach(token)
    array.finish()
    thread = threading.Thread(target=stream.poll)
    thread.start()
    thread.join()
    assert seen[0].origin.thread == threading.get_ident()
    assert otel_context.get_value("key", seen[0].origin.context) == "value"
    assert otel_context.get_value("key") is None


def test_observer_sees_values_that_are_not_emitted(exported: Any, seen: list[Logged]) -> None:
    """Disabled or closed, NaN, text: emission is one thing, observation another."""
    stream = GaugeStream("1", meter_provider=exported.provider, enabled=False, observe=seen.append)
    stream.log("", "loss", 1.0, MODE, 1)
    stream.log("", "loss", math.nan, MODE, 2)
    stream.close()
    stream.log("", "loss", "text", MODE, 3)
    assert [v.step for v in seen] == [1, 2, 3]
    assert exported.points() == {}


def test_observer_that_raises_is_told_once_and_costs_no_gauge(
    exported: Any, warnings_of: Callable[[str], list[str]]
) -> None:
    """A failure of telemetry is never the caller's."""

    def fail(logged: Logged) -> None:
        raise LookupError("boom")

    stream = GaugeStream("1", meter_provider=exported.provider, observe=fail, keep=ListStore)
    for step in range(3):
        stream.log("", "loss", 1.0, MODE, step)
    assert stored(stream, "loss") == [1.0, 1.0, 1.0]
    assert len(warnings_of("tunix")) == 1
    assert "boom" in warnings_of("tunix")[0]


def test_observer_may_log(exported: Any) -> None:
    """The stream's lock is re-entrant."""

    def echo(logged: Logged) -> None:
        if logged.series.name == "loss":
            stream.log("", "echo", logged.number, MODE, logged.step)

    stream = GaugeStream("1", meter_provider=exported.provider, observe=echo)
    stream.log("", "loss", 1.0, MODE, 4)
    assert exported.values() == {
        "tunix.echo": 1.0,
        "tunix.training.loss": 1.0,
        "tunix.training.step": 4,
    }


def test_observer_that_reads_a_waiting_metric_does_not_hang(exported: Any, fake_array: Any) -> None:
    """What waits inside an emission waits for that emission: nothing is left to wait for."""
    stream = GaugeStream("1", meter_provider=exported.provider, observe=lambda _: stream.settle())
    arrays = [fake_array(1.0), fake_array(2.0)]
    for step, array in enumerate(arrays):
        stream.log("", "loss", array, MODE, step)
    arrays[0].finish()
    stream.poll()
    stream.close()
    assert exported.value("tunix.training.loss") == 2.0


# Stores ------------------------------------------------------------------------------------------


def test_store_gets_its_series_in_log_order(stream: GaugeStream, fake_array: Any) -> None:
    """A number logged behind a value of the same series waits for it."""
    first, second = fake_array(1.0), fake_array(3.0)
    for step, value in enumerate((first, 2.0, second, "text", 10**400)):
        stream.log("", "loss", value, MODE, step)
    assert stored(stream, "loss") == []
    second.finish()
    stream.poll()
    assert stored(stream, "loss") == []
    first.finish()
    stream.poll()
    assert stored(stream, "loss") == [1.0, 2.0, 3.0, ("text", None), (10**400, math.inf)]


def test_stream_without_a_store_emits(exported: Any) -> None:
    """Who only wants gauges need not keep anything."""
    stream = GaugeStream("1.2.3", meter_provider=exported.provider)
    stream.log("", "loss", 1.0, MODE, 1)
    assert exported.value("tunix.training.loss") == 1.0
    assert exported.scopes() == {("tunix", "1.2.3")}


# Deferral ----------------------------------------------------------------------------------------


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The process index that JAX would tell; None while it has no backend."""
    index: list[int | None] = [None]
    monkeypatch.setattr(_process, "process_index", lambda: index[0])
    monkeypatch.setattr(_process, "last_process_index", lambda: index[0] or 0)
    return index


@pytest.mark.parametrize(("rank", "answer"), [(0, True), (1, False)])
def test_action_is_called_when_the_answer_is_known(
    stream: GaugeStream, index: list[int | None], rank: int, answer: bool
) -> None:
    """Once, with whether this process emits, by the next value."""
    answers: list[bool] = []
    assert stream.allowed() is None
    stream.defer(answers.append)
    stream.log("", "loss", 1.0, MODE, 1)
    assert answers == []
    index[0] = rank
    stream.log("", "loss", 1.0, MODE, 2)
    stream.log("", "loss", 1.0, MODE, 3)
    assert answers == [answer]
    assert (stream.allowed(), stream.process_index) == (answer, rank)


def test_action_is_called_without_a_meter_provider(index: list[int | None]) -> None:
    """Spans and events wait too, where no metrics are collected."""
    stream = GaugeStream("1")
    stream.log("", "loss", 1.0, MODE, 1)
    answers: list[bool] = []
    stream.defer(answers.append)
    index[0] = 0
    stream.log("", "loss", 1.0, MODE, 2)
    assert answers == [True]


def test_actions_run_without_the_lock(stream: GaugeStream, index: list[int | None]) -> None:
    """An action may reach a log handler whose lock another thread holds that logs a value."""
    free: list[bool] = []

    def action(allowed: bool) -> None:
        thread = threading.Thread(target=lambda: free.append(stream.lock.acquire(timeout=5)))
        thread.start()
        thread.join()

    stream.defer(action)
    index[0] = 0
    stream.log("", "loss", 1.0, MODE, 1)
    assert free == [True]


def test_waiting_gauges_go_out_in_log_order_with_their_counts(
    stream: GaugeStream, exported: Any, index: list[int | None]
) -> None:
    """The last finite value of each series, every non-finite one counted, the last step."""
    for step, (name, value) in enumerate(
        [("b", 1.0), ("a", math.nan), ("a", math.inf), ("a", 2.0), ("b", 3.0), ("b", math.nan)]
    ):
        stream.log("", name, value, MODE, step)
    assert exported.points() == {}
    index[0] = 0
    assert stream.allowed()
    assert exported.value("tunix.a") == 2.0
    assert exported.value("tunix.b") == 3.0
    assert exported.value("tunix.training.nonfinite", tunix__metrics__name="a") == 2
    assert exported.value("tunix.training.nonfinite", tunix__metrics__name="b") == 1
    assert exported.value("tunix.training.step") == 5


def test_nothing_waits_for_ever_on_another_process(
    exported: Any, seen: list[Logged], index: list[int | None]
) -> None:
    """Told that it is not the one, a stream lets go of what waited."""
    stream = GaugeStream("1", meter_provider=exported.provider)
    stream.log("", "loss", 1.0, MODE, 1)
    assert any(waiting is stream for waiting, _ in _process._unfinished)
    index[0] = 3
    stream.log("", "loss", 2.0, MODE, 2)
    assert not any(waiting is stream for waiting, _ in _process._unfinished)
    stream.close()
    assert exported.points() == {}


# Warnings ----------------------------------------------------------------------------------------


def test_warning_is_spoken_without_the_lock(stream: GaugeStream) -> None:
    """A handler may log a metric from another thread while it holds its own lock."""
    free: list[bool] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=lambda: free.append(stream.lock.acquire(timeout=5)))
            thread.start()
            thread.join()

    handler = Handler()
    logging.getLogger("tunix").addHandler(handler)
    try:
        stream.log("", "text", "x", MODE, 1)
    finally:
        logging.getLogger("tunix").removeHandler(handler)
    assert free == [True]


def test_log_handler_that_raises_is_no_ones_problem(stream: GaugeStream) -> None:
    """`log` never raises, also where the application's own logging does."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise LookupError

    handler = Handler()
    logging.getLogger("tunix").addHandler(handler)
    try:
        stream.log("", "text", "x", MODE, 1)
    finally:
        logging.getLogger("tunix").removeHandler(handler)
    assert stored(stream, "text") == [("x", None)]
