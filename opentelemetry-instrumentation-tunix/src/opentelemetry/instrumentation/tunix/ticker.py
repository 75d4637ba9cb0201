# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""One thread that emits a moment later what a training thread has only noted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from . import _process
from .telemetry import report_failure

INTERVAL: Final = 0.1
"""Seconds between something being scheduled and its call."""


class Ticker:
    """Calls each scheduled action once, some `INTERVAL` later, on a thread of its own.

    The thread is started by the first `schedule` and sleeps without waking while nothing is
    scheduled. A forked child starts one of its own when it schedules something itself. While the
    interpreter exits actions are called at once, by whoever schedules them.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()
        _process.register(self)

    def after_fork_in_child(self) -> None:
        """Forgets the parent's thread and actions."""
        # Reentrant: a signal handler or a finalizer may log at any moment.
        self._lock = threading.RLock()
        self._actions: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()

    def schedule(self, action: Callable[[], None]) -> None:
        """Has `action` called soon; it must not wait, and what it raises is logged once."""
        with self._lock:
            self._actions.append(action)
            if _process.ending():
                self._call_scheduled()
                return
            if self._thread is None and not self._start():
                return
            self._wake.set()

    def _start(self) -> bool:
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._wake, self._stop),
            name="tunix-telemetry",
            # It holds no process back; what waits at exit goes out by exit hooks.
            daemon=True,
        )
        # Threads in the middle of a JAX call when the interpreter ends abort the process.
        _process.hold(self, self)
        _process.finish_before_the_rest()
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is about to end: exit hooks emit what waits
            self._thread = None
        return self._thread is not None

    def stop(self) -> None:
        """Ends the thread and calls what is scheduled still."""
        with self._lock:
            # Taken first: a signal handler may schedule in between, and that starts a new thread.
            thread, stop, wake = self._thread, self._stop, self._wake
            self._thread = None
            _process.release(self, self)
            stop.set()
            wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._call_scheduled()

    def finish(self) -> None:
        """Ends the thread for good."""
        self.stop()

    def _run(self, wake: threading.Event, stop: threading.Event) -> None:
        while True:
            wake.wait()
            if stop.wait(INTERVAL):
                return
            with self._lock:
                # Asked again: clearing the wake-up call of a `stop` would be to sleep for ever.
                if stop.is_set():
                    return
                wake.clear()
            self._call_scheduled()

    def _call_scheduled(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, []
        for action in actions:
            try:
                action()
            except Exception:
                report_failure("emitting what was logged")


TICKER: Final = Ticker()
