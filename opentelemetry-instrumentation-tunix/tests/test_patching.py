# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Patching is exact: what is wrapped comes back as the very object it was."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.instrumentation.tunix import patching, telemetry
from opentelemetry.instrumentation.tunix.config import Options
from opentelemetry.instrumentation.tunix.patching import Call, Target

MODULE = "toy_library"


class Base:
    """A class whose methods are of every kind."""

    def plain(self, value: int, *, twice: bool = False) -> int:
        """Adds one."""
        return value * 2 + 1 if twice else value + 1

    @staticmethod
    def static(value: int) -> int:
        return value + 2

    @classmethod
    def of_class(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value + 3


class Child(Base):
    """Inherits everything."""


class _Meta(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise AssertionError("the metaclass is not to be asked")


class Guarded(metaclass=_Meta):
    """A class whose metaclass has a __setattr__ of its own."""

    def plain(self, value: int) -> int:
        return value


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Activates telemetry, offers the classes as a module, and records what passes the advice."""
    module = types.ModuleType(MODULE)
    for cls in (Base, Child, Guarded):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, MODULE, module)
    telemetry.activate(telemetry.Telemetry(Options.load({})))
    seen.clear()
    yield seen
    patching.restore()
    patching._patches.clear()
    telemetry.activate(None)


seen: list[tuple[Any, ...]] = []


def advice(call: Call) -> Any:
    seen.append((call.args, call.kwargs))
    return call.proceed()


def target(owner: str, method: str) -> Target:
    return Target(MODULE, owner, method, advice, "test span")


@pytest.mark.parametrize("method", ["plain", "static", "of_class"])
@pytest.mark.parametrize("cls", [Base, Child])
def test_every_kind_of_method_is_wrapped_and_restored_exactly(
    calls: list[Any], cls: type, method: str
) -> None:
    """Own and inherited, plain, static and class methods: same behaviour, same class afterwards."""
    before = dict(vars(cls))
    expected = getattr(cls(), method)(1)
    patching.apply([target(cls.__name__, method)])
    assert getattr(cls(), method)(1) == expected
    assert len(calls) == 1
    patching.restore()
    after = dict(vars(cls))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_instance_and_arguments_reach_the_advice(calls: list[Any]) -> None:
    """The advice gets what the wrapped function would have got."""
    patching.apply([target("Base", "plain")])
    instance = Base()
    assert instance.plain(2, twice=True) == 5
    assert Base.plain(instance, 2) == 3
    assert calls == [((instance, 2), {"twice": True}), ((instance, 2), {})]


def test_a_metaclass_with_its_own_setattr_is_not_asked(calls: list[Any]) -> None:
    """Classes are written through type.__setattr__."""
    raw = vars(Guarded)["plain"]
    patching.apply([target("Guarded", "plain")])
    assert Guarded().plain(4) == 4
    assert len(calls) == 1
    patching.restore()
    assert vars(Guarded)["plain"] is raw


def test_signature_name_and_docstring_stay(calls: list[Any]) -> None:
    """Inspect and help() see the original."""
    signature, doc = inspect.signature(Base.plain), Base.plain.__doc__
    patching.apply([target("Base", "plain")])
    assert inspect.signature(Base.plain) == signature
    assert (Base.plain.__name__, Base.plain.__doc__) == ("plain", doc)
    assert isinstance(Base.plain, types.FunctionType)


def test_wrapped_methods_pickle_and_copy(calls: list[Any]) -> None:
    """Functions by name, bound methods with their instance, as without instrumentation."""
    patching.apply([target("Base", "plain")])
    assert copy.deepcopy(Base().plain)(1) == 2
    assert copy.copy(Base.plain) is Base.plain
    module = sys.modules[Base.__module__] = types.ModuleType(Base.__module__)
    module.Base = Base  # type: ignore[attr-defined]
    try:
        assert pickle.loads(pickle.dumps(Base.plain)) is Base.plain
        assert pickle.loads(pickle.dumps(Base().plain))(1) == 2
    finally:
        del sys.modules[Base.__module__]


def test_applying_twice_wraps_once(calls: list[Any]) -> None:
    """A second apply finds the first one's work."""
    patching.apply([target("Base", "plain")])
    patching.apply([target("Base", "plain")])
    Base().plain(1)
    assert len(calls) == 1
    assert not hasattr(vars(Base)["plain"].__wrapped__, "__wrapped__")


def test_methods_cached_before_restore_fall_silent(calls: list[Any]) -> None:
    """A bound method taken earlier keeps working and emits nothing."""
    patching.apply([target("Base", "plain")])
    cached = Base().plain
    patching.restore()
    telemetry.activate(None)
    assert cached(1) == 2
    assert calls == []


def test_a_wrapper_of_another_library_on_top_survives_and_ours_is_reused(calls: list[Any]) -> None:
    """Restoring takes away nothing of theirs; instrumenting again does not wrap a second time."""
    raw = vars(Base)["plain"]
    patching.apply([target("Base", "plain")])
    ours = vars(Base)["plain"]

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    Base.plain = theirs  # type: ignore[method-assign]
    try:
        patching.restore()
        telemetry.activate(None)
        assert vars(Base)["plain"] is theirs
        assert Base().plain(1) == 2
        assert calls == []
        telemetry.activate(telemetry.Telemetry(Options.load({})))
        patching.apply([target("Base", "plain")])
        assert vars(Base)["plain"] is theirs
        Base().plain(1)
        assert len(calls) == 1
        Base.plain = ours  # type: ignore[method-assign]  # they take theirs off
        patching.restore()
        assert vars(Base)["plain"] is raw
    finally:
        type.__setattr__(Base, "plain", raw)


def test_a_wrapper_of_another_library_beneath_comes_back(calls: list[Any]) -> None:
    """What was there when we came, wrapper or not, is what is there when we go."""
    raw = vars(Base)["plain"]

    @functools.wraps(raw)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return raw(*args, **kwargs)

    Base.plain = theirs  # type: ignore[method-assign]
    try:
        patching.apply([target("Base", "plain")])
        assert Base().plain(1) == 2
        patching.restore()
        assert vars(Base)["plain"] is theirs
    finally:
        type.__setattr__(Base, "plain", raw)


@pytest.mark.parametrize(("owner", "method"), [("Base", "gone"), ("Gone", "plain")])
def test_a_missing_target_is_told_once_at_info(
    calls: list[Any], caplog: pytest.LogCaptureFixture, owner: str, method: str
) -> None:
    """Its telemetry is lost, the rest works, nothing raises."""
    patching._announced.clear()
    with caplog.at_level(logging.DEBUG, "opentelemetry.instrumentation.tunix"):
        for _ in range(2):
            patching.apply([target(owner, method), target("Base", "plain")])
            patching.restore()
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert f"{owner}.{method}" in caplog.text
    assert "test span" in caplog.text


def test_a_module_imported_later_is_patched_then(
    calls: list[Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table waits for the import, and only the table that is active then counts."""
    for name in ("late_one", "late_two"):
        (tmp_path / f"{name}.py").write_text("class C:\n    def m(self): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    patching.apply([Target(n, "C", "m", advice, "x") for n in ("late_one", "late_two")])
    assert "late_one" not in sys.modules
    import late_one  # pyright: ignore[reportMissingImports]

    assert late_one.C().m() == 1
    assert len(calls) == 1
    patching.restore()
    import late_two  # pyright: ignore[reportMissingImports]

    assert not hasattr(late_two.C.m, "__wrapped__")


def test_a_failing_hook_does_not_fail_the_import(
    calls: list[Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exception while patching is logged; the user's import succeeds."""
    (tmp_path / "late_three.py").write_text("class C:\n    def m(self): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    patching.apply([Target("late_three", "C", "m", advice, "x")])
    monkeypatch.setattr(patching, "_patch", lambda *_: 1 / 0)
    import late_three  # pyright: ignore[reportMissingImports]

    assert late_three.C().m() == 1
    assert "instrumenting late_three" in caplog.text
