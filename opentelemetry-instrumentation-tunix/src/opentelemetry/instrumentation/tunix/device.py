# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""When work that was dispatched has ended on the device, without a sync in the training loop.

JAX returns from a call long before the device is done. For each set of devices in use a watcher
thread waits for the results of one call after the other, in the order of the calls, which is the
order in which the devices work. It notes the time and nothing else: what follows from it (spans
end, histograms are recorded, time is accounted) is done in batches by the ticker, since a thread
that works while the training loop wants to go on costs the loop that time.

Times are nanoseconds of `time.perf_counter_ns`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from opentelemetry import trace

from . import _process
from .telemetry import report_failure
from .ticker import TICKER

_LONGEST_QUEUE: Final = 1024
_MOST_DONE: Final = 65_536
_PATIENCE: Final = 5.0
_RETURN_PATIENCE: Final = 1.0


class DeviceTime(NamedTuple):
    """When a piece of work began and ended on its devices."""

    began: int
    ended: int


class Work:
    """A call that has given devices something to do.

    Attributes:
        array: An output of the call that is there when the work is done; None for a call whose
            end is known, `returned`.
        started: When the call began.
        not_before: When the devices can have begun at the earliest.
        returned: When the call returned.
        devices: Ids of the devices, once they are known.
    """

    __slots__ = ("array", "devices", "not_before", "returned", "started")

    def __init__(self) -> None:
        self.array: Any = None
        self.started = self.not_before = self.returned = 0
        self.devices: frozenset[int] | None = None

    def finish(self, device: DeviceTime | None, error: BaseException | None) -> None:
        """Tells of the work.

        Args:
            device: When it was done; None where that is not known.
            error: What the device raised.
        """
        raise NotImplementedError


class _Watcher:
    """The thread that waits for one set of devices."""

    def __init__(self, devices: frozenset[int], completed: dict[int, int]) -> None:
        self.devices = devices
        self._completed = completed
        self._queue: SimpleQueue[Work | threading.Event | None] = SimpleQueue()
        self._newest: Any = None
        # Whoever takes a piece of work out of here finishes it; a single operation, so no lock.
        self._waiting: dict[Work, None] = {}
        self.thread = threading.Thread(target=self._run, name="tunix-watcher", daemon=True)
        self.thread.start()

    def watch(self, work: Work) -> bool:
        """Takes a piece of work; False where too many wait already."""
        if len(self._waiting) >= _LONGEST_QUEUE:
            return False
        work.devices = self.devices
        self._newest = work.array
        self._waiting[work] = None
        self._queue.put(work)
        return True

    def catch_up(self, patience: float) -> None:
        """Waits until what the devices have done already is noted; not for the devices."""
        newest = self._newest
        if newest is None or newest.is_deleted() or newest.is_ready():
            self.wait(patience)

    def wait(self, patience: float) -> None:
        """Waits until everything that was given so far is noted."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait(patience)

    def stop(self) -> None:
        """Has the thread end when it has seen everything that waits now."""
        self._queue.put(None)

    def give_up(self) -> None:
        """Finishes what waits still without knowing when it is done."""
        for work in list(self._waiting):
            if self._take(work):
                _deliver(work, None, None)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            device, error = self._wait_for(item)
            if self._take(item):  # else it was given up meanwhile
                _deliver(item, device, error)
            del item, error

    def _take(self, work: Work) -> bool:
        return self._waiting.pop(work, self) is None

    def _wait_for(self, work: Work) -> tuple[DeviceTime | None, BaseException | None]:
        array, error = work.array, None
        if array is None:
            ended = work.returned
        else:
            try:
                array.block_until_ready()
            except BaseException as raised:
                # Deleted by its owner: nothing can be known. Anything else the device has raised.
                if _is_deleted(array):
                    return None, None
                error = raised.with_traceback(None)
            ended = time.perf_counter_ns()
            if self._newest is array:
                self._newest = None
            work.array = None
        completed = self._completed
        began = max(work.started, work.not_before, *(completed.get(d, 0) for d in self.devices))
        for device in self.devices:
            completed[device] = max(completed.get(device, 0), ended)
        return DeviceTime(min(began, ended), ended), error


def _is_deleted(array: Any) -> bool:
    try:
        return bool(array.is_deleted())
    except Exception:
        return False


class _Watchers:
    """All watchers of this process."""

    def __init__(self) -> None:
        self._by_devices: dict[frozenset[int], _Watcher] = {}
        self._abandoned: list[_Watcher] = []
        self._completed: dict[int, int] = {}
        self._recent: tuple[object, _Watcher | None] = (None, None)
        self._lock = threading.RLock()
        self._provider: object = None

    def watch(self, array: Any, work: Work) -> bool:
        """Has the end of `array` noted as the end of `work`; False where that cannot be.

        `array` is a `jax.Array`. It is waited for and nothing else.
        """
        if _process.ending():  # A thread that is started now is one that nobody would end.
            return False
        work.array = array
        return self._of(array).watch(work)

    def follow(self, devices: frozenset[int] | None, work: Work) -> None:
        """Finishes `work`, whose end is known, after what its devices have to do before it."""
        watcher = None if devices is None else self._by_devices.get(devices)
        if watcher is None or not watcher.watch(work):
            _deliver(work, DeviceTime(work.started, work.returned), None)

    def _of(self, array: Any) -> _Watcher:
        sharding = array.sharding
        recent, watcher = self._recent
        if watcher is None or sharding is not recent:
            watcher = self._for(frozenset(device.id for device in sharding.device_set))
            self._recent = sharding, watcher
        return watcher

    def _for(self, devices: frozenset[int]) -> _Watcher:
        with self._lock:
            watcher = self._by_devices.get(devices)
            if watcher is None:
                watcher = self._by_devices[devices] = _Watcher(devices, self._completed)
                _process.hold(self, self)
                _process.finish_before_the_rest()
            return watcher

    def follow_provider(self) -> None:
        """Exit hooks run last-in first-out, and each tracer provider has one: ours comes first."""
        provider = trace.get_tracer_provider()
        if provider is not self._provider:
            self._provider = provider
            _process.finish_before_the_rest()

    def catch_up(self) -> None:
        """Finishes what the devices have done by now; does not wait for what they have not."""
        for watcher in list(self._by_devices.values()):
            watcher.catch_up(_RETURN_PATIENCE)
        settle()

    def wait(self, patience: float = _PATIENCE) -> None:
        """Waits for the devices, some seconds at most, and finishes what they have done."""
        for watcher in list(self._by_devices.values()):
            watcher.wait(patience)
        settle()

    def stop(self) -> None:
        """Ends all watchers; what is not done in a few seconds has no device time."""
        with self._lock:
            watchers, self._by_devices = list(self._by_devices.values()), {}
            self._recent = (None, None)
        deadline = time.monotonic() + _PATIENCE
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.thread.join(max(0.0, deadline - time.monotonic()))
            watcher.give_up()
            if watcher.thread.is_alive():
                self._abandoned.append(watcher)
        if not self._abandoned:
            _process.release(self, self)
        settle()

    def finish(self) -> None:
        """Waits for the devices: JAX waits for them now too.

        A thread inside a JAX call while the interpreter ends would abort the process.
        """
        watchers = [*self._by_devices.values(), *self._abandoned]
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.thread.join()
        settle()

    def after_fork_in_child(self) -> None:
        """Forgets the parent's work; the threads do not exist here."""
        # Freeing a device array in the child may wait for a lock that nobody will release.
        _leaked.append((self._by_devices, list(_done)))
        _done.clear()
        self.__init__()
        _reset_in_child()


WATCHERS: Final = _Watchers()
_process.register(WATCHERS)

_done: deque[tuple[Work, DeviceTime | None, BaseException | None]] = deque(maxlen=_MOST_DONE)
_leaked: list[object] = []
_scheduled = False
# Reentrant: a span processor may run anything.
_settling = threading.RLock()


def _reset_in_child() -> None:
    global _scheduled, _settling
    _scheduled, _settling = False, threading.RLock()


def finish_soon(work: Work) -> None:
    """Finishes work of which nothing more will be known than that its call has returned."""
    _deliver(work, None, None)


def _deliver(work: Work, device: DeviceTime | None, error: BaseException | None) -> None:
    global _scheduled
    work.array = None
    _done.append((work, device, error))
    if not _scheduled:
        _scheduled = True
        TICKER.schedule(settle)


def settle() -> None:
    """Tells of the work that is done, in the order in which it was found done."""
    global _scheduled
    # First, so that what is delivered meanwhile is not forgotten.
    _scheduled = False
    WATCHERS.follow_provider()
    if not _settling.acquire(timeout=_PATIENCE):
        return
    try:
        for count in range(len(_done)):
            work, device, error = _done.popleft()
            try:
                work.finish(device, error)
            except Exception:
                report_failure("telling of a step")
            if count % _POLITE == _POLITE - 1:
                time.sleep(0)  # the training thread may want to go on
    except IndexError:  # a span processor has come in between and taken the rest
        pass
    finally:
        _settling.release()


_POLITE: Final = 8
