# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a stream of values has to know about its process: its index, its end, its forks.

This module exists twice, byte for byte; `_scalars.py` says why.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import Protocol

from ._instruments import reset_locks_in_child


class Lasting(Protocol):
    """What lives as long as the process unless it is finished before."""

    def finish(self) -> None:
        """Emits what still waits, waiting for the device; the interpreter is about to exit."""
        ...

    def after_fork_in_child(self) -> None:
        """Falls silent: the child shares the parent's identity."""
        ...


def process_index() -> int | None:
    """`jax.process_index()`, or None as long as asking would create a JAX backend.

    A backend that is created too early makes `jax.distributed.initialize` fail, and before it
    exists nobody knows whether this process is the one that emits. JAX has no public question for
    it; where the internal one should be gone, nothing is known and emission waits for the end of
    the process.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    try:
        # A backend that is being created right now holds the lock for seconds.
        if bridge is None or bridge._backend_lock.locked():
            return None
        return sys.modules["jax"].process_index() if bridge.backends_are_initialized() else None
    except Exception:  # also in the middle of `import jax` in another thread
        return None


def last_process_index() -> int | None:
    """The index at a moment after which nothing more will be known.

    Without a backend the process has been alone, unless it joined a distributed job: then it is
    not known which of its processes this is.
    """
    index = process_index()
    if index is not None:
        return index
    jax = sys.modules.get("jax")
    try:
        return None if jax is not None and jax.distributed.is_initialized() else 0
    except Exception:
        return None


_lock = threading.Lock()
_all: weakref.WeakSet[Lasting] = weakref.WeakSet()
_unfinished: set[tuple[Lasting, object]] = set()
_ending = False


def register(lasting: Lasting) -> None:
    """Makes `lasting` known to forks."""
    with _lock:
        _all.add(lasting)


def hold(lasting: Lasting, reason: object) -> None:
    """Keeps `lasting` alive until `release` for the same reason; at exit it is finished."""
    _unfinished.add((lasting, reason))


def release(lasting: Lasting, reason: object) -> None:
    """Ends what `hold` began."""
    _unfinished.discard((lasting, reason))


def finish_before_the_rest() -> None:
    """Makes our exit hook the first to run among those registered so far.

    Exit hooks run last-in first-out. A provider registers its shutdown when it is made and JAX
    registers its own when it is imported: what still waits has to go out before either.
    """
    if _ending:  # A hook that is registered while hooks run is never called.
        return
    atexit.unregister(_finish_all)
    atexit.register(_finish_all)


def ending() -> bool:
    """Whether the interpreter is about to exit: nothing may start that has to be ended."""
    return _ending


def _finish_all() -> None:
    global _ending
    _ending = True
    for lasting in {lasting for lasting, _ in _unfinished}:
        lasting.finish()


def _after_fork_in_child() -> None:
    global _lock, _ending
    _lock, _ending = threading.Lock(), False
    reset_locks_in_child()
    for lasting in list(_all):
        lasting.after_fork_in_child()
    _unfinished.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
