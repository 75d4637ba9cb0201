# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Where the wall time of a run went: each second once for each set of devices.

The watchers say when devices were busy. What lies between is overhead where the host was known to
compile, save, evaluate or wait for data, and idle where it was not. Times are nanoseconds of
`time.perf_counter_ns`.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from opentelemetry.util.types import AttributeValue

from . import semconv
from .telemetry import Telemetry
from .ticker import TICKER


class Bucket:
    """Values of `tunix.time.bucket`."""

    PRODUCTIVE: Final = "productive"
    OVERHEAD: Final = "overhead"
    IDLE: Final = "idle"
    WASTED: Final = "wasted"


class Phase:
    """Values of `tunix.time.phase`."""

    TRAIN: Final = "train"
    INPUTS: Final = "inputs"
    EVAL: Final = "eval"
    COMPILE: Final = "compile"
    CHECKPOINT: Final = "checkpoint"
    DATA: Final = "data_loading"
    IDLE: Final = "idle"


# Where two of them overlap, the first one counts: a checkpoint may compile, a batch be loaded
# while it is written.
_HOST_PHASES: Final = (Phase.COMPILE, Phase.CHECKPOINT, Phase.DATA)
_REMEMBERED: Final = 4096


class _Spent(NamedTuple):
    bucket: str
    phase: str
    mesh: int
    role: str | None


class _Interval(NamedTuple):
    begin: int
    end: int
    role: str


class _Phase:
    """When the host was in one phase: intervals that do not overlap, oldest first."""

    def __init__(self) -> None:
        self._intervals: list[_Interval] = []

    def add(self, begin: int, end: int, role: str) -> None:
        known = self._intervals
        while known and known[-1].begin >= begin:  # it lies within: a compilation within another
            end = max(end, known.pop().end)
        if known:
            begin = max(begin, known[-1].end)
        if begin < end:
            known.append(_Interval(begin, end, role))
        if len(known) > _REMEMBERED:
            del known[: _REMEMBERED // 2]

    def within(self, begin: int, end: int) -> Iterator[_Interval]:
        """The parts of it that lie in a gap."""
        first = bisect.bisect(self._intervals, begin, key=lambda interval: interval.end)
        for interval in itertools.islice(self._intervals, first, None):
            if interval.begin >= end:
                return
            yield _Interval(max(begin, interval.begin), min(end, interval.end), interval.role)


class _Mesh:
    __slots__ = ("index", "until", "unwatched")

    def __init__(self, index: int, until: int) -> None:
        self.index = index
        self.until = until
        self.unwatched = False


class TimeAccount:
    """The time of one run.

    Work of one set of devices is told in the order of its end; the host's phases as they end, and
    so before the work that they delayed.

    Args:
        telemetry: What to emit through.
        began: When the run began.
    """

    def __init__(self, telemetry: Telemetry, began: int) -> None:
        self._telemetry = telemetry
        self._began = began
        self._meshes: list[_Mesh] = []
        self._index: dict[frozenset[int], int] = {}
        self._host = {phase: _Phase() for phase in _HOST_PHASES}
        self._spent: Counter[_Spent] = Counter()
        self._closed = False
        # Reentrant: a signal handler may end the run.
        self._lock = threading.RLock()

    def host(self, phase: str, begin: int, end: int, role: str) -> None:
        """The host was busy with one of its phases."""
        with self._lock:
            self._host[phase].add(begin, end, role)

    def device(
        self,
        devices: frozenset[int] | None,
        began: int,
        ended: int,
        *,
        bucket: str,
        phase: str,
        role: str,
    ) -> None:
        """Devices were busy; None for devices that are not known, which are the run's first."""
        with self._lock:
            if self._closed:
                return
            mesh = self._mesh(devices)
            if not mesh.unwatched:
                self._fill(mesh, began)
            mesh.unwatched = False
            self._spend(_Spent(bucket, phase, mesh.index, role), ended - mesh.until)
            mesh.until = max(mesh.until, ended)

    def unwatched(self, devices: frozenset[int] | None) -> None:
        """Devices have work whose end nobody will see: they are busy until more is known."""
        with self._lock:
            self._mesh(devices).unwatched = True

    def close(self, ended: int) -> None:
        """The run is over: what is not accounted for yet is told, and nothing after it."""
        with self._lock:
            if self._closed:
                return
            self._mesh(None)
            for mesh in self._meshes:
                self._fill(mesh, ended)
            self._closed = True
        self.emit()

    def emit(self) -> None:
        """Adds what was spent since the last time to the counter."""
        with self._lock:
            spent, self._spent = self._spent, Counter()
        instruments = self._telemetry.instruments
        if instruments is None or not self._telemetry.options.device_time:
            return
        for what, nanoseconds in spent.items():
            attributes: dict[str, AttributeValue] = {
                **self._telemetry.process_attributes,
                semconv.TIME_BUCKET: what.bucket,
                semconv.TIME_PHASE: what.phase,
                semconv.MESH: what.mesh,
            }
            if what.role is not None:
                attributes[semconv.ROLE] = what.role
            instruments.time.add(nanoseconds / 1e9, attributes)

    def _mesh(self, devices: frozenset[int] | None) -> _Mesh:
        index = 0
        if devices is not None:
            index = self._index.setdefault(devices, len(self._index))
        while len(self._meshes) <= index:
            self._meshes.append(_Mesh(len(self._meshes), self._began))
        return self._meshes[index]

    def _fill(self, mesh: _Mesh, until: int) -> None:
        """Accounts for a gap of a mesh by what the host did meanwhile."""
        gaps = [(mesh.until, until)] if until > mesh.until else []
        for phase, host in self._host.items():
            rest: list[tuple[int, int]] = []
            for begin, end in gaps:
                for part in host.within(begin, end):
                    rest.append((begin, part.begin))
                    what = _Spent(Bucket.OVERHEAD, phase, mesh.index, part.role)
                    self._spend(what, part.end - part.begin)
                    begin = part.end
                rest.append((begin, end))
            gaps = rest
        for begin, end in gaps:
            self._spend(_Spent(Bucket.IDLE, Phase.IDLE, mesh.index, None), end - begin)
        mesh.until = max(mesh.until, until)

    def _spend(self, what: _Spent, nanoseconds: int) -> None:
        if nanoseconds <= 0:
            return
        if not self._spent:
            TICKER.schedule(self.emit)
        self._spent[what] += nanoseconds
