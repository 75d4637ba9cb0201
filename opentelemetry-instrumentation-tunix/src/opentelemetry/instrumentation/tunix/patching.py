# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Exact patching: methods are wrapped on their class and every class comes back as it was.

The entry of the class `__dict__` itself is saved and put back, so that static, class and inherited
methods return as what they were. A wrapper is a plain function with `__wrapped__` and not a wrapt
`FunctionWrapper`: methods of an instrumented class can be pickled, copied and compared as before.
wrapt supplies what needs its import machinery (post-import hooks, here) and object proxies.

A wrapper asks for the active telemetry at each call. It can therefore stay in place, silent, where
another library has wrapped on top of it and removing it would remove theirs, and bound methods
that were cached before `uninstrument()` fall silent too.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

import wrapt

from .telemetry import Telemetry, active, report_failure

_log = logging.getLogger(__package__)


class Call(NamedTuple):
    """A call of a wrapped method that has not been made yet.

    Attributes:
        telemetry: What to emit through.
        function: The wrapped function, not bound.
        args: Positional arguments, the instance or class first unless the method is static.
        kwargs: The caller's keyword arguments.
    """

    telemetry: Telemetry
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def instance(self) -> Any:
        """What the method was called on."""
        return self.args[0]

    def proceed(self) -> Any:
        """Makes the call."""
        return self.function(*self.args, **self.kwargs)


Advice: TypeAlias = Callable[[Call], Any]
"""What runs instead of a wrapped method.

It proceeds with the call exactly once, returns what that returned and lets its exceptions pass.
"""


class Target(NamedTuple):
    """One method to wrap.

    Attributes:
        module: Module that defines the class; nothing happens until it is imported.
        owner: Class name.
        method: Method name; may be inherited.
        advice: What runs instead.
        gives: What is lost where the release has no such method (for the log line).
    """

    module: str
    owner: str
    method: str
    advice: Advice
    gives: str


class _Missing:
    """The class inherits the method: there was no entry of its own."""


_MISSING: Final = _Missing()


class _Patch(NamedTuple):
    cls: type
    method: str
    raw: Any
    installed: Any


_lock = threading.RLock()
_table: tuple[Target, ...] = ()
_patches: dict[tuple[type, str], _Patch] = {}
# Hooks cannot be unregistered and wrapt fires each once: this keeps a second `instrument()` from
# registering a second one while the first still waits.
_waiting: set[str] = set()
_announced: set[Target] = set()


def apply(table: Iterable[Target]) -> None:
    """Wraps every target of `table`: now where its module is imported, else when it will be."""
    global _table
    with _lock:
        _table = tuple(table)
        for name in dict.fromkeys(target.module for target in _table):
            if name in sys.modules:
                _patch_module(sys.modules[name])
            elif name not in _waiting:
                _waiting.add(name)
                wrapt.register_post_import_hook(_on_import, name)


def restore() -> None:
    """Puts every class back as it was.

    Where another library has wrapped on top, our (now silent) entry stays beneath it, and the next
    `apply` uses it again.
    """
    global _table
    with _lock:
        _table = ()
        for key, patch in list(_patches.items()):
            if vars(patch.cls).get(patch.method) is not patch.installed:
                continue
            # type.__setattr__, because a metaclass may have one of its own.
            if patch.raw is _MISSING:
                type.__delattr__(patch.cls, patch.method)
            else:
                type.__setattr__(patch.cls, patch.method, patch.raw)
            del _patches[key]


def _on_import(module: ModuleType) -> None:
    # An exception here would make the user's import fail.
    with _lock:
        _waiting.discard(module.__name__)
        try:
            _patch_module(module)
        except Exception:
            report_failure(f"instrumenting {module.__name__}")


def _patch_module(module: ModuleType) -> None:
    for target in _table:
        if target.module == module.__name__ and not _patch(module, target):
            _announce_missing(target)


def _patch(module: ModuleType, target: Target) -> bool:
    """Wraps one target; False where this release does not have it."""
    cls = getattr(module, target.owner, None)
    if not isinstance(cls, type) or not callable(getattr(cls, target.method, None)):
        return False
    key = (cls, target.method)
    patch = _patches.get(key)
    if patch is not None and _is_beneath(patch.installed, vars(cls).get(target.method)):
        return True
    raw = vars(cls).get(target.method, _MISSING)
    installed = _wrap(_inherited(cls, target.method) if raw is _MISSING else raw, target.advice)
    type.__setattr__(cls, target.method, installed)
    _patches[key] = _Patch(cls, target.method, raw, installed)
    return True


def _inherited(cls: type, method: str) -> Any:
    return next(vars(base)[method] for base in cls.__mro__[1:] if method in vars(base))


def _wrap(raw: Any, advice: Advice) -> Any:
    """Wraps a raw class entry and keeps its kind: function, staticmethod or classmethod."""
    function: Callable[..., Any] = getattr(raw, "__func__", raw)
    if isinstance(raw, staticmethod):
        return staticmethod(_advised(function, advice, static=True))
    if isinstance(raw, classmethod):
        return classmethod(_advised(function, advice))
    return _advised(function, advice)


def _advised(function: Callable[..., Any], advice: Advice, *, static: bool = False) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        telemetry = active()
        if telemetry is None or not (static or args):
            return function(*args, **kwargs)
        return advice(Call(telemetry, function, args, kwargs))

    return wrapper


def _is_beneath(ours: Any, entry: Any) -> bool:
    """Whether `ours` is `entry` or lies in the chain of functions that `entry` wraps."""
    seen: set[int] = set()
    while entry is not None and id(entry) not in seen:
        if entry is ours:
            return True
        seen.add(id(entry))
        entry = getattr(entry, "__wrapped__", None)
    return False


def _announce_missing(target: Target) -> None:
    if target not in _announced:
        _announced.add(target)
        _log.info(
            "This Tunix has no %s.%s.%s: no %s.",
            target.module,
            target.owner,
            target.method,
            target.gives,
        )
