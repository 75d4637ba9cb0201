# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The thread that emits: started by need, one of it, gone when stopped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.instrumentation.tunix import ticker as ticker_module
from opentelemetry.instrumentation.tunix.ticker import Ticker

NAME = "tunix-telemetry"


@pytest.fixture
def ticker() -> Iterator[Ticker]:
    ticker_module.TICKER.stop()  # a test before may have left the process's own running
    ticker = Ticker()
    yield ticker
    ticker.stop()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_no_thread_runs_before_something_is_scheduled(ticker: Ticker) -> None:
    """Importing and instrumenting start none."""
    assert threads() == []


def test_each_action_is_called_once_on_one_thread(ticker: Ticker) -> None:
    """However many are scheduled, there is one thread, and it is not the caller's."""
    done = threading.Event()
    callers: list[threading.Thread] = []
    for _ in range(5):
        ticker.schedule(lambda: callers.append(threading.current_thread()))
    ticker.schedule(done.set)
    assert len(threads()) == 1
    assert done.wait(30)
    assert callers == threads() * 5
    assert threading.current_thread() not in callers


def test_a_failing_action_does_not_end_the_thread(
    ticker: Ticker, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once and the next one is called."""
    done = threading.Event()
    ticker.schedule(lambda: 1 / 0)
    ticker.schedule(done.set)
    assert done.wait(30)
    assert len(caplog.records) == 1


def test_a_stopped_ticker_leaves_no_thread_and_starts_again(ticker: Ticker) -> None:
    """Many cycles leave nothing behind."""
    for _ in range(20):
        done = threading.Event()
        ticker.schedule(done.set)
        ticker.stop()
        assert threads() == []
    done = threading.Event()
    ticker.schedule(done.set)
    assert done.wait(30)


def test_stopping_returns_whatever_the_thread_is_doing(
    ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the instant in which the thread has found nothing to stop it and not acted yet."""
    between, stopped = threading.Event(), threading.Event()

    class Event(threading.Event):
        """An event whose timed wait lets a stop happen just after it has said no."""

        def wait(self, timeout: float | None = None) -> bool:
            found = super().wait(timeout)
            if timeout == ticker_module.INTERVAL and not found:
                between.set()
                assert stopping.wait(30)
            return found

    stopping = threading.Event()
    monkeypatch.setattr(ticker_module.threading, "Event", Event)
    ticker.schedule(lambda: None)
    monkeypatch.undo()
    assert between.wait(30)

    def stop() -> None:
        ticker.stop()
        stopped.set()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    while ticker._thread is not None:
        time.sleep(0.001)
    stopping.set()
    assert stopped.wait(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_a_thread_of_its_own(ticker: Ticker) -> None:
    """The parent's thread does not exist in the child."""
    ticker.schedule(lambda: None)
    child = os.fork()
    if child == 0:
        done = threading.Event()
        ticker.schedule(done.set)
        os._exit(0 if done.wait(30) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
