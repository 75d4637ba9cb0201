# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that can be logged and what becomes of it: the one table that tests and docs share."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NOT_KEPT: Final = "(not kept)"
"""`ValueCase.kept` of what the history leaves out."""


@dataclass(frozen=True)
class Kind:
    """A row of the documented table.

    Attributes:
        values: What is logged.
        kept: What the history keeps.
        emitted: What the gauge gets, "" for nothing.
        counted: Whether it counts on `tunix.training.nonfinite`.
        warned: Whether there is a warning, once a key.
    """

    values: str
    kept: str
    emitted: str
    counted: bool = False
    warned: bool = False


@dataclass(frozen=True)
class ValueCase:
    """One value.

    Attributes:
        kind: The row of the documented table that it is an example of.
        name: Names the case.
        make: Makes a fresh value; called where JAX has a CPU backend of four devices.
        kept: The entry of the history, `NOT_KEPT` for none.
        emitted: The gauge's value, None for none.
    """

    kind: Kind
    name: str
    make: Callable[[], Any]
    kept: Any
    emitted: float | None = None

    @property
    def counted(self) -> bool:
        """Whether it counts as not finite."""
        return self.kind.counted

    @property
    def warned(self) -> bool:
        """Whether it is warned about, once a key."""
        return self.kind.warned

    @property
    def number(self) -> float | None:
        """What it counts as in a mean; None for not at all."""
        if self.emitted is not None or not self.counted:
            return self.emitted
        return math.inf if isinstance(self.kept, int) else float(self.kept)

    def __str__(self) -> str:
        return self.name


NUMBER = Kind("a Python or NumPy number, bool, Decimal, Fraction", "float64", "float64")
SMALL = Kind("bfloat16, float8, int4 and the like", "float64", "float64")
BIG = Kind("an integer that float64 does not hold exactly", "the integer", "the nearest float64")
ONE = Kind("an array or list of one element, of any shape", "float64", "float64")
DEVICE = Kind("a JAX array of one element, once it is computed", "float64", "float64")
RATIO = Kind("an object with `numerator` and `denominator`", "the quotient", "the quotient")
NOT_FINITE = Kind("NaN, infinity", "as it is", "", counted=True)
BEYOND = Kind("an integer beyond float64", "the integer", "", counted=True)
LOST = Kind("a JAX array deleted or donated before it was read", "NaN", "", True, True)
OTHER = Kind("None, text, a complex number, a dict, any other object", "a copy", "", warned=True)
MANY = Kind("an array or list of no element or several", "a copy", "", warned=True)
TRACER = Kind("a tracer: `log` inside a function that JAX traces", "not at all", "", warned=True)

KINDS: Final = (
    *(NUMBER, SMALL, BIG, ONE, DEVICE, RATIO),
    *(NOT_FINITE, BEYOND, LOST, OTHER, MANY, TRACER),
)


class Averaging:
    """Stands for a metric object that divides when it is asked."""

    def __init__(self, numerator: Any, denominator: Any) -> None:
        self.numerator = numerator
        self.denominator = denominator


class Variable:
    """Stands for what wraps an array, as `flax.nnx.Variable` does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> Any:
        return self.value


class Broken:
    """A number that refuses to be one."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Broken)

    __hash__ = None  # type: ignore[assignment]


@functools.cache
def _slow() -> Any:
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ y), x)[0, 0] * 0 + 1.5

    return jax.jit(run)


def pending() -> jax.Array:
    """1.5, a few milliseconds from now."""
    return _slow()(jnp.ones((300, 300)))


def deleted() -> jax.Array:
    """An array whose buffer is gone."""
    array = jnp.float32(1.5) + 0
    array.delete()
    return array


_increment = jax.jit(lambda x: x + 1, donate_argnums=0)


def donated() -> jax.Array:
    """An array that was given away."""
    array = jnp.float32(1.5) + 0
    _increment(array)
    assert array.is_deleted()
    return array


def placed(*spec: str, shape: tuple[int, ...] = ()) -> jax.Array:
    """An array over all devices, sharded along `spec`, replicated without."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(jnp.full(shape, 1.5), NamedSharding(mesh, PartitionSpec(*spec)))


def tracer() -> Any:
    """A tracer that its trace left behind."""
    found: list[Any] = []
    jax.jit(lambda x: found.append(x) or x)(1.0)
    return found[0]


def _value_of(dtype: str) -> float:
    return 1.5 if "float" in dtype or dtype == "longdouble" else 1.0 if dtype == "bool" else 3.0


def _numpy(dtype: str) -> tuple[ValueCase, ...]:
    value, scalar = _value_of(dtype), np.dtype(dtype).type
    return (
        ValueCase(NUMBER, f"np.{dtype}", lambda: scalar(value), value, value),
        ValueCase(ONE, f"0-d {dtype}", lambda: np.array(value, dtype), value, value),
    )


def _small(dtype: str) -> tuple[ValueCase, ...]:
    value, scalar = _value_of(dtype), getattr(ml_dtypes, dtype)
    return (
        ValueCase(SMALL, dtype, lambda: scalar(value), value, value),
        ValueCase(SMALL, f"1-d {dtype}", lambda: np.array([value], scalar), value, value),
    )


def _jax(dtype: str) -> ValueCase:
    value = _value_of(dtype)
    return ValueCase(DEVICE, f"jax {dtype}", lambda: jnp.asarray(value, dtype), value, value)


_NUMPY = "float16 float32 float64 longdouble int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_JAX = "float16 float32 int8 int16 int32 uint8 uint16 uint32 bool"
_SMALL = (
    "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e3m4 float4_e2m1fn int4 uint4"
)
_TWO = [1.0, 2.0]
_WHEN = datetime.datetime(2026, 1, 2)

VALUE_CASES: Final[tuple[ValueCase, ...]] = (
    ValueCase(NUMBER, "float", lambda: 1.5, 1.5, 1.5),
    ValueCase(NUMBER, "negative zero", lambda: -0.0, -0.0, -0.0),
    ValueCase(NUMBER, "smallest float", lambda: 5e-324, 5e-324, 5e-324),
    ValueCase(NUMBER, "large float", lambda: 8e307, 8e307, 8e307),
    ValueCase(NUMBER, "int", lambda: 3, 3.0, 3.0),
    ValueCase(NUMBER, "True", lambda: True, 1.0, 1.0),
    ValueCase(NUMBER, "False", lambda: False, 0.0, 0.0),
    ValueCase(NUMBER, "np.bool", lambda: np.bool_(True), 1.0, 1.0),
    ValueCase(NUMBER, "Decimal", lambda: Decimal("1.5"), 1.5, 1.5),
    ValueCase(NUMBER, "Fraction", lambda: Fraction(3, 2), 1.5, 1.5),
    ValueCase(NUMBER, "2**63", lambda: 2**63, 2.0**63, 2.0**63),
    ValueCase(NUMBER, "-2**63", lambda: -(2**63), -(2.0**63), -(2.0**63)),
    ValueCase(NUMBER, "2**70", lambda: 2**70, 2.0**70, 2.0**70),
    *(case for dtype in _NUMPY.split() for case in _numpy(dtype)),
    *(case for dtype in _SMALL.split() for case in _small(dtype)),
    ValueCase(BIG, "2**53 + 1", lambda: 2**53 + 1, 2**53 + 1, 2.0**53),
    ValueCase(BIG, "2**64 - 1", lambda: 2**64 - 1, 2**64 - 1, 2.0**64),
    ValueCase(BIG, "-2**70 - 1", lambda: -(2**70) - 1, -(2**70) - 1, -(2.0**70)),
    ValueCase(BIG, "last np.uint64", lambda: np.uint64(2**64 - 1), 2**64 - 1, 2.0**64),
    ValueCase(BIG, "last int64, 0-d", lambda: np.array(2**63 - 1), 2**63 - 1, 2.0**63),
    ValueCase(ONE, "1-d array", lambda: np.array([1.5]), 1.5, 1.5),
    ValueCase(ONE, "2-d array", lambda: np.array([[1.5]], np.float32), 1.5, 1.5),
    ValueCase(ONE, "0-d bool", lambda: np.array(True), 1.0, 1.0),
    ValueCase(ONE, "array of one object", lambda: np.array([Decimal("1.5")]), 1.5, 1.5),
    ValueCase(ONE, "list", lambda: [1.5], 1.5, 1.5),
    ValueCase(ONE, "tuple", lambda: (1.5,), 1.5, 1.5),
    ValueCase(ONE, "list of lists", lambda: [[1.5]], 1.5, 1.5),
    ValueCase(ONE, "list of a jax array", lambda: [jnp.float32(1.5)], 1.5, 1.5),
    *(_jax(dtype) for dtype in f"{_JAX} {_SMALL}".split()),
    ValueCase(DEVICE, "jax 1-d", lambda: jnp.array([1.5]), 1.5, 1.5),
    ValueCase(DEVICE, "jax 2-d", lambda: jnp.array([[1.5]]), 1.5, 1.5),
    ValueCase(DEVICE, "pending", pending, 1.5, 1.5),
    ValueCase(DEVICE, "replicated", placed, 1.5, 1.5),
    ValueCase(DEVICE, "other device", lambda: jax.device_put(1.5, jax.devices()[-1]), 1.5, 1.5),
    ValueCase(DEVICE, "__jax_array__", lambda: Variable(jnp.float32(1.5)), 1.5, 1.5),
    ValueCase(DEVICE, "__jax_array__ pending", lambda: Variable(pending()), 1.5, 1.5),
    ValueCase(RATIO, "ratio", lambda: Averaging(3, np.float32(2)), 1.5, 1.5),
    ValueCase(RATIO, "ratio in jax", lambda: Averaging(jnp.float32(3), jnp.int32(2)), 1.5, 1.5),
    ValueCase(RATIO, "ratio pending", lambda: Averaging(pending(), 1), 1.5, 1.5),
    ValueCase(NOT_FINITE, "ratio of zeros", lambda: Averaging(0, 0), math.nan),
    ValueCase(NOT_FINITE, "ratio by zero", lambda: Averaging(-jnp.float32(1), 0), -math.inf),
    ValueCase(NOT_FINITE, "nan", lambda: math.nan, math.nan),
    ValueCase(NOT_FINITE, "inf", lambda: math.inf, math.inf),
    ValueCase(NOT_FINITE, "-inf", lambda: -math.inf, -math.inf),
    ValueCase(NOT_FINITE, "np.float32 nan", lambda: np.float32("nan"), math.nan),
    ValueCase(NOT_FINITE, "bfloat16 inf", lambda: ml_dtypes.bfloat16("inf"), math.inf),
    ValueCase(NOT_FINITE, "array nan", lambda: np.array([math.nan]), math.nan),
    ValueCase(NOT_FINITE, "jax nan", lambda: jnp.float32("nan"), math.nan),
    ValueCase(NOT_FINITE, "jax bfloat16 -inf", lambda: jnp.bfloat16(-math.inf), -math.inf),
    ValueCase(NOT_FINITE, "Decimal NaN", lambda: Decimal("NaN"), math.nan),
    ValueCase(NOT_FINITE, "longdouble overflow", lambda: np.longdouble("1e4000"), math.inf),
    ValueCase(BEYOND, "10**400", lambda: 10**400, 10**400),
    ValueCase(LOST, "deleted", deleted, math.nan),
    ValueCase(LOST, "donated", donated, math.nan),
    ValueCase(LOST, "list of a deleted array", lambda: [deleted()], math.nan),
    ValueCase(LOST, "ratio of a deleted array", lambda: Averaging(deleted(), 2), math.nan),
    ValueCase(OTHER, "None", lambda: None, None),
    ValueCase(OTHER, "text", lambda: "text", "text"),
    ValueCase(OTHER, "text of a number", lambda: "1.5", "1.5"),
    ValueCase(OTHER, "np.str", lambda: np.str_("text"), "text"),
    ValueCase(OTHER, "array of one text", lambda: np.array(["x"], object), "x"),
    ValueCase(OTHER, "array of None", lambda: np.array([None]), None),
    ValueCase(OTHER, "list of None", lambda: [None], None),
    ValueCase(OTHER, "bytes", lambda: b"\xff", b"\xff"),
    ValueCase(OTHER, "complex", lambda: 1 + 2j, 1 + 2j),
    ValueCase(OTHER, "np.complex64", lambda: np.complex64(1 + 2j), 1 + 2j),
    ValueCase(OTHER, "jax complex64", lambda: jnp.complex64(1 + 2j), 1 + 2j),
    ValueCase(OTHER, "datetime", lambda: _WHEN, _WHEN),
    ValueCase(OTHER, "np.datetime64", lambda: np.datetime64(0, "s"), np.datetime64(0, "s")),
    ValueCase(OTHER, "dict", lambda: {"a": 1.0}, {"a": 1.0}),
    ValueCase(OTHER, "dict of a jax array", lambda: {"a": jnp.float32(1.5)}, {"a": 1.5}),
    ValueCase(OTHER, "set", lambda: {1.0}, [1.0]),
    ValueCase(OTHER, "any object", lambda: Ellipsis, Ellipsis),
    ValueCase(OTHER, "Decimal sNaN", lambda: Decimal("sNaN"), Decimal("sNaN")),
    ValueCase(OTHER, "number that raises", Broken, Broken()),
    ValueCase(OTHER, "ratio of text", lambda: Averaging("a", 2), "a"),
    ValueCase(OTHER, "random key", lambda: jax.random.key(0), "key<fry>"),
    ValueCase(MANY, "empty array", lambda: np.array([]), np.array([])),
    ValueCase(MANY, "empty list", list, []),
    ValueCase(MANY, "two in a list", lambda: list(_TWO), _TWO),
    ValueCase(MANY, "two in an array", lambda: np.array(_TWO), np.array(_TWO)),
    ValueCase(MANY, "two texts", lambda: np.array(["a", "b"]), np.array(["a", "b"])),
    ValueCase(MANY, "two objects", lambda: np.array([1.0, None]), [1.0, None]),
    ValueCase(MANY, "jax vector", lambda: jnp.array(_TWO), np.array(_TWO, np.float32)),
    ValueCase(MANY, "jax empty", lambda: jnp.array([]), np.array([], np.float32)),
    ValueCase(MANY, "sharded", lambda: placed("x", shape=(4,)), np.full(4, 1.5, np.float32)),
    ValueCase(MANY, "list with a jax array", lambda: [jnp.float32(1.5), 2], [1.5, 2]),
    ValueCase(TRACER, "tracer", tracer, NOT_KEPT),
)


def same(left: Any, right: Any) -> bool:
    """Whether two entries of a history are equal: NaN equals NaN, arrays by type and content."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    if isinstance(left, Decimal) and left.is_snan():
        return isinstance(right, Decimal) and right.is_snan()
    if left is None or right is None:
        return left is right
    return bool(left == right) or bool(left != left and right != right)
