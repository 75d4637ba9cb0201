# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers are read from anything, and nothing is waited for."""

from __future__ import annotations

import enum
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from value_cases import VALUE_CASES, Averaging, ValueCase, deleted, placed

from tunix.sft import _scalars
from tunix.sft._scalars import DeviceValue, Other, Ratio, as_number, as_step, read, read_step


def settled(value: Any) -> Any:
    """`read` with the wait that `log` never does."""
    result = read(value)
    if isinstance(result, DeviceValue | Ratio):
        result.wait()
        assert result.ready()
        return result.read()
    return result


@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_result_is_a_plain_number_or_other(case: ValueCase) -> None:
    """Exactly float or int, so that no bool and no NumPy scalar goes further."""
    result = settled(case.make())
    if case.number is None:
        assert isinstance(result, Other)
        assert as_number(result) is None
    else:
        assert type(result) in (float, int, Other)
        assert isinstance(result, Other) == case.warned


class Level(enum.IntEnum):
    LOW = 3


class Temperature(float):
    pass


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (Level.LOW, 3.0),
        (Temperature(1.5), 1.5),
        (2**53, 2.0**53),
        (-(2**53), -(2.0**53)),
        (np.int64(-(2**63)), -(2.0**63)),
        (np.float32(0.1), float(np.float32(0.1))),
        (Fraction(10**400, 2 * 10**399), 5.0),
        (np.array([[[7]]], np.uint8), 7.0),
        ([np.array([2.5])], 2.5),
    ],
)
def test_number_keeps_its_value(value: Any, number: float) -> None:
    """Subclasses and nested containers too; float32 is widened, not rounded."""
    result = read(value)
    assert (type(result), result) == (float, number)


def test_new_types_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types made in a loop are read and not remembered for ever."""
    monkeypatch.setattr(_scalars, "_readers", {})
    monkeypatch.setattr(_scalars, "_KNOWN_TYPES", 8)
    for index in range(50):
        assert read(type(f"Float{index}", (float,), {})(1.5)) == 1.5
    assert len(_scalars._readers) == 8


def test_array_on_the_device_is_not_converted_before_it_is_ready(fake_array: Any) -> None:
    """It is asked for on a handle of its own; the copy to the host is asked for once."""
    array = fake_array(1.5)
    result = read(array)
    assert isinstance(result, DeviceValue)
    assert not result.ready()
    assert (array.waits, array.copies) == (0, 1)
    array.finish()
    assert result.ready()
    assert result.read() == 1.5


@pytest.mark.parametrize(
    ("numerator", "denominator", "quotient"),
    [(3, 2, 1.5), (0, 0, math.nan), (1, 0, math.inf), (-1, 0, -math.inf), (math.nan, 0, math.nan)],
)
def test_ratio_waits_for_both_parts(
    fake_array: Any, numerator: float, denominator: float, quotient: float
) -> None:
    """Division is done on the host in float64, by zero too."""
    above, below = fake_array(numerator), fake_array(denominator)
    result = read(Averaging(above, below))
    assert isinstance(result, Ratio)
    above.finish()
    assert not result.ready()
    below.finish()
    assert result.ready()
    assert result.read() == pytest.approx(quotient, nan_ok=True)


def test_ratio_of_ratios_is_no_number(fake_array: Any) -> None:
    """One level of division is understood."""
    assert isinstance(read(Averaging(Averaging(fake_array(1.0), 2), 3)), Other)


class Recursive:
    """Its own numerator."""

    denominator = 1

    @property
    def numerator(self) -> Recursive:
        return self


def test_endless_recursion_is_an_object() -> None:
    """A list that holds itself, or a ratio of itself, ends."""
    loop: list[Any] = []
    loop.append(loop)
    for value in (loop, Recursive()):
        assert isinstance(read(value), Other)


@pytest.mark.parametrize("deep", [5, 50])
def test_nested_containers_are_cut(deep: int) -> None:
    """What hangs deeper than four levels is not kept."""
    value: Any = jnp.float32(1.5)
    for _ in range(deep):
        value = {"a": value}
    result = read(value)
    assert isinstance(result, Other)
    assert result.kept == {"a": {"a": {"a": {"a": "<nested>"}}}}


def test_containers_let_go_of_arrays(fake_array: Any) -> None:
    """Arrays on a device become numbers, deleted ones NaN."""
    result = read({"a": [jnp.float32(1.5), 2], "b": (deleted(),), "c": np.ones(2)})
    assert isinstance(result, Other)
    kept: Any = result.kept
    assert kept["a"] == [1.5, 2]
    assert math.isnan(kept["b"][0])
    assert kept["c"].tolist() == [1.0, 1.0]


def test_sharded_array_is_put_together() -> None:
    """From the shards, without a computation on the devices."""
    array = jax.device_put(np.arange(8.0).reshape(4, 2), placed("x", shape=(4,)).sharding)
    result = settled(array)
    assert isinstance(result, Other)
    assert np.array_equal(np.asarray(result.kept), np.arange(8.0).reshape(4, 2))


class SpreadArray:
    """Stands for an array with parts on devices of another process."""

    dtype, shape, size = np.dtype("float32"), (), 1
    is_fully_replicated = is_fully_addressable = False

    def is_deleted(self) -> bool:
        return False


def test_array_of_another_process_is_not_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the history; it is not lost, so it does not count."""
    monkeypatch.setitem(_scalars._readers, SpreadArray, _scalars._device_array)
    result = read(SpreadArray())
    assert isinstance(result, Other)
    assert math.isnan(float(str(result.kept)))
    assert not result.lost
    assert as_number(result) is None


@pytest.mark.parametrize(
    ("step", "number"),
    [(3, 3), (3.0, 3), (np.uint8(3), 3), (2**70, 2**70), (True, 1), (jnp.asarray(3), 3)],
)
def test_step_is_a_python_int(step: Any, number: int) -> None:
    """Also of a size that only the emission refuses."""
    result = read_step(step)
    assert (type(result), result) == (int, number)


@pytest.mark.parametrize("step", [None, "3", 3.5, math.nan, math.inf, [3, 4], {}, 3j])
def test_other_steps_are_none(step: Any) -> None:
    """Nothing is guessed."""
    assert read_step(step) is None
    assert as_step(Other(3, "not a number")) is None
