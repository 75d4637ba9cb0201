# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Watchers: the end of device work is seen in order, without a sync and without a leak."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opentelemetry.instrumentation.tunix import device
from opentelemetry.instrumentation.tunix.device import WATCHERS, DeviceTime, Work


@pytest.fixture(autouse=True)
def no_watchers() -> Iterator[None]:
    WATCHERS.stop()
    yield
    WATCHERS.stop()
    assert [t for t in threading.enumerate() if t.name == "tunix-watcher"] == []


class Device:
    """What an array says of where it is."""

    def __init__(self, *ids: int) -> None:
        self.device_set = [type("Device", (), {"id": i})() for i in ids]


MESH, OTHER, BOTH = Device(0), Device(1), Device(0, 1)


class Pending:
    """An array that is there when the test says so; a real device cannot be told when to end."""

    def __init__(self, sharding: Device = MESH, error: BaseException | None = None) -> None:
        self.sharding = sharding
        self._error = error
        self._deleted = False
        self._done = threading.Event()

    def complete(self) -> None:
        self._done.set()

    def delete(self) -> None:
        self._deleted = True
        self._done.set()

    def block_until_ready(self) -> None:
        self._done.wait(30)
        if self._error is not None:
            raise self._error
        if self._deleted:
            raise RuntimeError("deleted")

    def is_ready(self) -> bool:
        return self._done.is_set()

    def is_deleted(self) -> bool:
        return self._deleted


class Note(Work):
    """Work that notes how it ended."""

    __slots__ = ("device", "error", "log", "name")

    def __init__(self, log: list[Note], name: str = "", started: int | None = None) -> None:
        super().__init__()
        self.log = log
        self.name = name
        self.device: DeviceTime | None = None
        self.error: BaseException | None = None
        self.started = self.returned = started or time.perf_counter_ns()

    def finish(self, device: DeviceTime | None, error: BaseException | None) -> None:
        self.device, self.error = device, error
        self.log.append(self)


def test_work_of_a_real_device_ends_when_its_result_is_there() -> None:
    """Not when the call returns."""
    log: list[Note] = []
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ x), x).sum())
    x = jnp.full((300, 300), 1e-3)
    step(x).block_until_ready()
    note = Note(log)
    result = step(x)
    assert WATCHERS.watch(result, note)
    assert not result.is_ready()
    result.block_until_ready()
    ended = time.perf_counter_ns()
    WATCHERS.wait()
    assert log == [note]
    assert note.device is not None
    assert note.started <= note.device.began < note.device.ended
    assert note.device.ended - note.started >= 0.5 * (ended - note.started)


def test_work_begins_when_the_work_before_it_has_ended() -> None:
    """On its own devices, and on devices that it shares."""
    log: list[Note] = []
    arrays = [Pending(), Pending(), Pending(OTHER), Pending(BOTH)]
    notes = [Note(log, name) for name in ("first", "second", "other", "both")]
    for array, note in zip(arrays, notes, strict=True):
        assert WATCHERS.watch(array, note)
    for array in arrays:
        array.complete()
        while len(log) <= arrays.index(array):
            WATCHERS.catch_up()
    first, second, other, both = (note.device for note in notes)
    assert first.began == notes[0].started
    assert second.began == first.ended
    assert other.began == notes[2].started
    assert both.began == max(second.ended, other.ended)


def test_a_long_job_of_one_mesh_does_not_delay_the_news_of_another() -> None:
    """Each set of devices has a watcher of its own."""
    log: list[Note] = []
    long, short = Pending(MESH), Pending(OTHER)
    WATCHERS.watch(long, Note(log, "long"))
    WATCHERS.watch(short, Note(log, "short"))
    short.complete()
    while not log:
        WATCHERS.catch_up()
    assert [note.name for note in log] == ["short"]
    long.complete()


def test_work_cannot_begin_before_its_call_has_compiled_it() -> None:
    """However long the call took."""
    log: list[Note] = []
    array, note = Pending(), Note(log)
    note.not_before = note.returned = note.started + 1_000
    WATCHERS.watch(array, note)
    array.complete()
    WATCHERS.wait()
    assert note.device.began == note.not_before


def test_an_error_of_the_device_marks_its_own_work() -> None:
    """Not the work after it."""
    log: list[Note] = []
    boom = RuntimeError("device")
    arrays = [Pending(), Pending(error=boom), Pending()]
    for array in arrays:
        WATCHERS.watch(array, Note(log))
        array.complete()
    WATCHERS.wait()
    assert [note.error for note in log] == [None, boom, None]
    assert log[2].device.began >= log[1].device.ended


def test_a_result_deleted_by_its_owner_has_no_device_time() -> None:
    """Nothing is known then, and that is no failure."""
    log: list[Note] = []
    array = Pending()
    WATCHERS.watch(array, Note(log))
    array.delete()
    WATCHERS.wait()
    assert [(note.device, note.error) for note in log] == [(None, None)]


def test_work_with_a_known_end_keeps_its_place() -> None:
    """A step that failed when it was called is told of after those before it."""
    log: list[Note] = []
    array = Pending()
    WATCHERS.watch(array, Note(log, "first"))
    failed = Note(log, "failed")
    failed.returned = failed.started + 5
    WATCHERS.follow(frozenset({0}), failed)
    device.settle()
    assert log == []
    array.complete()
    WATCHERS.wait()
    assert [note.name for note in log] == ["first", "failed"]


def test_with_unknown_devices_it_is_told_of_at_once() -> None:
    """The first step of all may fail."""
    log: list[Note] = []
    failed = Note(log)
    failed.returned = failed.started + 5
    WATCHERS.follow(frozenset({77}), failed)
    WATCHERS.follow(None, failed)
    device.settle()
    assert [note.device for note in log] == [DeviceTime(failed.started, failed.returned)] * 2


def test_too_much_waiting_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller ends it as host-only; nothing piles up."""
    monkeypatch.setattr(device, "_LONGEST_QUEUE", 2)
    log: list[Note] = []
    arrays = [Pending() for _ in range(3)]
    assert [WATCHERS.watch(array, Note(log)) for array in arrays] == [True, True, False]
    for array in arrays:
        array.complete()


def test_catching_up_waits_for_no_device() -> None:
    """A trainer may return while its last step is still being computed."""
    log: list[Note] = []
    done, pending = Pending(), Pending()
    done.complete()
    WATCHERS.watch(done, Note(log, "done"))
    WATCHERS.watch(pending, Note(log, "pending"))
    WATCHERS.catch_up()
    assert "pending" not in [note.name for note in log]
    pending.complete()


def test_stopping_gives_up_what_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, and once: what comes later is not told a second time."""
    monkeypatch.setattr(device, "_PATIENCE", 0.2)
    log: list[Note] = []
    arrays = [Pending(), Pending()]
    for array in arrays:
        WATCHERS.watch(array, Note(log))
    WATCHERS.stop()
    assert [note.device for note in log] == [None, None]
    for array in arrays:
        array.complete()
    WATCHERS.finish()
    WATCHERS.stop()
    assert len(log) == 2


def test_arrays_are_let_go_once_their_work_is_done() -> None:
    """Device memory is not held by telemetry."""
    log: list[Note] = []
    array, note = Pending(), Note(log)
    WATCHERS.watch(array, note)
    array.complete()
    WATCHERS.wait()
    assert note.array is None


def test_work_that_fails_to_be_told_does_not_stop_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning."""

    class Broken(Note):
        __slots__ = ()

        def finish(self, *_: Any) -> None:
            raise ZeroDivisionError

    log: list[Note] = []
    for note in (Broken(log), Note(log)):
        array = Pending()
        array.complete()
        WATCHERS.watch(array, note)
    WATCHERS.wait()
    assert len(log) == 1
    assert len(caplog.records) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_knows_nothing_of_the_parents_work() -> None:
    """It finishes none of it, and can have watchers of its own."""
    log: list[Note] = []
    array = Pending()
    WATCHERS.watch(array, Note(log))
    child = os.fork()
    if child == 0:
        array.complete()
        WATCHERS.finish()
        own = Pending()
        own.complete()
        WATCHERS.watch(own, Note(log, "own"))
        WATCHERS.wait()
        os._exit(0 if [note.name for note in log] == ["own"] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    array.complete()
    WATCHERS.wait()
    assert len(log) == 1
