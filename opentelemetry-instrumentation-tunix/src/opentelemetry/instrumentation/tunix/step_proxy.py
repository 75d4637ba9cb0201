# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the proxies around a trainer's compiled steps share."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import wrapt

from . import context
from .instruments import is_provided
from .telemetry import Telemetry

if TYPE_CHECKING:
    # wrapt carries types from release 2 on only, and then generic ones that release 1 cannot
    # subscript.
    class _Proxy:
        __wrapped__: Any

        def __init__(self, wrapped: Any) -> None: ...
else:
    _Proxy = wrapt.ObjectProxy


class StepProxy(_Proxy):
    """A compiled step of a trainer.

    A proxy, because the trainer reads attributes of the callable (`func`, `jitted_fn`, `lower`),
    which differ between releases. Copies and pickles are those of the wrapped callable.
    """

    def __copy__(self) -> Any:
        """A shallow copy of the wrapped callable."""
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of the wrapped callable."""
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the wrapped callable."""
        return _itself, (self.__wrapped__,)


def _itself(wrapped: Any) -> Any:
    return wrapped


def compiled_name(step: Any) -> str | None:
    """The name under which JAX compiles a step as a whole; None for one that is not jitted."""
    function = getattr(step, "func", step)  # of a partial
    if not hasattr(function, "jitted_fn") and not hasattr(function, "lower"):
        return None
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else None


def first_array(result: Any) -> Any:
    """The output of a step that a watcher can wait for: the loss; None where there is none.

    Inside somebody else's `jit` outputs are tracers, which cannot be waited for.
    """
    outputs = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)
    for candidate in outputs:
        if hasattr(candidate, "block_until_ready") and hasattr(candidate, "sharding"):
            return candidate
    return None


def is_watched(telemetry: Telemetry, *, recorded: bool) -> bool:
    """Whether anybody wants to know when the device is done: what samples spans does not decide."""
    return bool(telemetry.options.device_time) and (
        recorded or is_provided(telemetry.meter_provider)
    )


def role_of(trainer: Any) -> str:
    """Whose work a trainer does, in the words of `tunix.role`."""
    return str(getattr(trainer, "metrics_prefix", None) or context.DEFAULT_ROLE)
