# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a logged value is worth: numbers read from anything, device values read without waiting.

This module exists twice, byte for byte: in `tunix.sft` and in
`opentelemetry.instrumentation.tunix`. The two distributions apply the same rules to the same calls,
and neither may depend on the other; a test holds the copies equal. Hence no import from `tunix`,
and none of JAX at import: whoever logs a `jax.Array` has imported it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

NOTHING: Final = object()
"""Kept in place of a value that is not part of the history at all."""

_EXACT: Final = 2**53
_KNOWN_TYPES: Final = 512


@dataclass(frozen=True, slots=True)
class Other:
    """A value that is no number, or a number that cannot be had.

    Attributes:
        kept: What the history keeps: the value itself on the host, NaN for a number that exists
            but cannot be read here, or `NOTHING`.
        reason: Completes "value of <name> is not emitted: it is ...".
        lost: Whether a measurement is gone; it counts as not finite then.
    """

    kept: object
    reason: str
    lost: bool = False


class DeviceValue:
    """A `jax.Array` that may not be computed yet, behind handles that only this object has.

    Whoever logged the array may delete or donate it at any moment from any thread. On the caller's
    object that is fatal: `is_ready()` of a deleted array, or a deletion while another thread
    converts it, ends the process. `addressable_data` returns a new array object on the same
    buffer; a deletion then invalidates the buffer but not the handle, and every later use of the
    handle raises a Python exception at worst.
    """

    __slots__ = ("_index", "_shape", "_views")

    def __init__(self, array: Any) -> None:
        if array.is_fully_replicated:
            self._shape: tuple[int, ...] = ()
            self._index: list[Any] = []
            self._views: list[Any] = [array.addressable_data(0)]
        elif array.is_fully_addressable:
            shards = array.addressable_shards
            self._shape = array.shape
            self._index = [shard.index for shard in shards]
            self._views = [shard.data.addressable_data(0) for shard in shards]
        else:
            raise ValueError("the array is spread over processes")

    def ready(self) -> bool:
        """Whether `read` returns at once, be it a value or the news that it is lost."""
        try:
            return all(view.is_ready() for view in self._views)
        except Exception:
            return True

    def start(self) -> DeviceValue:
        """Asks for the copy to the host, which does not wait."""
        # It may be deleted meanwhile, or a transfer guard may refuse.
        with contextlib.suppress(Exception):
            for view in self._views:
                if not _in_host_memory(view):
                    view.copy_to_host_async()
        return self

    def wait(self) -> None:
        """Blocks until `ready`; the GIL is released."""
        with contextlib.suppress(Exception):  # `read` tells what happened
            for view in self._views:
                view.block_until_ready()

    def read(self) -> float | int | Other:
        """The value on the host; what has been deleted or has failed is lost."""
        try:
            parts = [_to_host(view) for view in self._views]
        except Exception as error:
            if any(view.is_deleted() for view in self._views):
                return _DELETED
            return Other(math.nan, f"lost: {type(error).__name__} on the device", lost=True)
        if not self._index:
            return _array(parts[0])
        whole = np.empty(self._shape, parts[0].dtype)
        for index, part in zip(self._index, parts, strict=True):
            whole[index] = part
        return _array(whole)


class Ratio:
    """A numerator over a denominator, at least one of them still on the device."""

    __slots__ = ("_parts",)

    def __init__(self, numerator: Value, denominator: Value) -> None:
        self._parts = (numerator, denominator)

    def ready(self) -> bool:
        """Whether `read` returns at once."""
        return all(part.ready() for part in self._parts if isinstance(part, DeviceValue))

    def wait(self) -> None:
        """Blocks until `ready`."""
        for part in self._parts:
            if isinstance(part, DeviceValue):
                part.wait()

    def read(self) -> float | int | Other:
        """The quotient as float64."""
        parts = [part.read() if isinstance(part, DeviceValue) else part for part in self._parts]
        return _divide(parts[0], parts[1])


Value = float | int | Other | DeviceValue | Ratio
"""A float is any number that float64 holds; an int is one that it does not hold exactly."""

_DELETED: Final = Other(math.nan, "lost: the array was deleted or donated before it was read", True)
_SPREAD: Final = Other(math.nan, "on devices of another process")
_TRACER: Final = Other(NOTHING, "a JAX tracer: log() ran while a function was being traced")


def read(value: Any) -> Value:
    """Reads a logged value without waiting for a device; never raises.

    Args:
        value: Anything; what was read already reads as itself.

    Returns:
        A float or an int for what is one number, `DeviceValue` or `Ratio` for a number that is
        still being computed, `Other` for everything else.
    """
    cls = cast("type[Any]", type(value))
    try:
        reader = _readers.get(cls)
        if reader is None:
            reader = _reader_for(cls)
            # Types made in a loop must not gather here.
            if len(_readers) < _KNOWN_TYPES:
                _readers[cls] = reader
        return reader(value)
    except Exception as error:
        return Other(_on_host(value), f"a {cls.__name__} that raised {type(error).__name__}")


def read_step(step: Any) -> int | DeviceValue | Ratio | None:
    """Reads a step; None for what is no whole number.

    What was read already reads as itself, None included.
    """
    value = read(step)
    return value if isinstance(value, DeviceValue | Ratio) else as_step(value)


def as_step(value: float | int | Other) -> int | None:
    """The whole number that `value` is, or None."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return None if isinstance(value, Other) else value


def as_number(value: float | int | Other) -> float | None:
    """The float64 that stands for `value` in a mean or a gauge; None for what is no number."""
    if isinstance(value, Other):
        return math.nan if value.lost else None
    return _float(value)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _integer(value: Any) -> float | int:
    value = int(value)
    if -_EXACT <= value <= _EXACT:
        return float(value)
    number = _float(value)
    return number if math.isfinite(number) and int(number) == value else value


def _numpy_scalar(value: Any) -> float | int | Other:
    kind = value.dtype.kind
    if kind in "iu":
        return _integer(value)
    # Kind V holds bfloat16, float8 and the like of ml_dtypes, and records, which are no numbers.
    if kind in "fb" or (kind == "V" and hasattr(value, "__float__")):
        return float(value)
    return _no_number(value)


def _array(value: Any) -> float | int | Other:
    """One element is a number whatever the shape; more stay together, copied."""
    if value.size == 1:
        if isinstance(value, _MASKED_ARRAY) and value.mask.all():
            return math.nan  # what a mean over nothing is; the data below a mask is arbitrary
        item = value.item()
        return item if type(item) is float else _settled(read(item))
    return Other(value.copy() if value.dtype.kind != "O" else _on_host(value.tolist()), _MANY)


def _sequence(value: Any) -> Value:
    return read(value[0]) if len(value) == 1 else Other(_on_host(value), _MANY)


def _device_array(array: Any) -> Value:
    if not isinstance(array.dtype, np.dtype):
        return Other(str(array.dtype), f"an array of {array.dtype}")
    try:
        value = DeviceValue(array)
    except Exception:
        return _DELETED if array.is_deleted() else _SPREAD
    return value.read() if value.ready() else value.start()


def _tracer(value: Any) -> Other:
    del value  # nothing of the trace may outlive it
    return _TRACER


def _no_number(value: Any) -> Other:
    return Other(_on_host(value), f"a {type(value).__name__}")


def _itself(value: Value) -> Value:
    return value


def _unknown(value: Any) -> Value:
    if hasattr(value, "__jax_array__"):
        return read(value.__jax_array__())
    if hasattr(value, "numerator") and hasattr(value, "denominator"):
        return _ratio(value)
    return _float(value) if hasattr(value, "__float__") else _no_number(value)


def _ratio(value: Any) -> Value:
    numerator, denominator = read(value.numerator), read(value.denominator)
    if isinstance(numerator, Ratio) or isinstance(denominator, Ratio):
        return _no_number(value)
    if isinstance(numerator, DeviceValue) or isinstance(denominator, DeviceValue):
        return Ratio(numerator, denominator)
    return _divide(numerator, denominator)


def _divide(numerator: Value, denominator: Value) -> float | Other:
    for part in (numerator, denominator):
        if isinstance(part, Other):
            return part
    above, below = _float(numerator), _float(denominator)
    if below == 0.0:
        return math.copysign(math.inf, above) if above and not math.isnan(above) else math.nan
    return above / below


def _settled(value: Value) -> float | int | Other:
    """An element of a host array that is itself on a device is not waited for."""
    return Other(math.nan, _MANY) if isinstance(value, DeviceValue | Ratio) else value


def _reader_for(cls: type) -> Callable[[Any], Value]:
    for base, reader in _BY_BASE:
        if issubclass(cls, base):
            return reader
    jax = sys.modules.get("jax")
    if jax is not None and issubclass(cls, jax.core.Tracer):  # in older JAX a jax.Array too
        return _tracer
    if jax is not None and issubclass(cls, jax.Array):
        return _device_array
    return _unknown


def _to_host(view: Any) -> Any:
    if view.size == 1 and view.dtype.name not in _PACKED and _in_host_memory(view):
        return _from_memory(view)
    try:
        return np.asarray(view)
    except Exception:
        if view.is_deleted():
            raise
        # A transfer guard refuses implicit transfers; this one is explicit.
        return sys.modules["jax"].device_get(view)


def _from_memory(view: Any) -> Any:
    """One element out of host memory.

    On the CPU backend NumPy is lent the buffer itself, and the borrowing lets go of the GIL; a
    `delete()` by another thread in that moment ends the process (one in some 50,000 that collide).
    Here address and bytes are fetched without a bytecode in between, so with the GIL held all the
    time, and a deletion or donation before that shows afterwards.
    """
    memory: Callable[[int], Any] = (ctypes.c_char * view.dtype.itemsize).from_address
    raw = next(map(bytes, map(memory, map(_address, (view,)))))
    if view.is_deleted():
        raise ValueError("deleted or donated")
    return np.frombuffer(raw, view.dtype).reshape(view.shape)


def _in_host_memory(view: Any) -> bool:
    return view.device.platform == "cpu"


_address: Callable[[Any], int] = operator.methodcaller("unsafe_buffer_pointer")
# Less than a byte each: the rest of their byte in host memory is anything.
_PACKED: Final = frozenset({"int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn"})


def _on_host(value: Any, depth: int = 4) -> object:
    """A copy of `value` that no device array and no tracer hangs on.

    Containers are followed to a depth of four; what is nested deeper is kept as "<nested>".
    """
    if depth == 0 and isinstance(value, _CONTAINERS):
        return "<nested>"
    if isinstance(value, _CONTAINERS):
        below = depth - 1
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {key: _on_host(item, below) for key, item in items}
        copies = [_on_host(item, below) for item in cast("Iterable[Any]", value)]
        return tuple(copies) if isinstance(value, tuple) else copies
    if isinstance(value, np.ndarray):
        return cast("Any", value).copy()
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, (jax.Array, jax.core.Tracer)):
        number = read(value)
        return number.kept if isinstance(number, Other) else _settled(number)
    return value


_CONTAINERS: Final = (list, tuple, set, frozenset, dict)
_MASKED_ARRAY: Any = np.ma.MaskedArray
_MANY: Final = "not one number"

_BY_BASE: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], Value]], ...]] = (
    (bool, float),
    (np.generic, _numpy_scalar),
    (float, float),
    (int, _integer),
    ((str, bytes, complex, type(None), dict, set, frozenset), _no_number),
    (np.ndarray, _array),
    ((list, tuple), _sequence),
)
_readers: dict[type, Callable[[Any], Value]] = dict.fromkeys((DeviceValue, Ratio, Other), _itself)
