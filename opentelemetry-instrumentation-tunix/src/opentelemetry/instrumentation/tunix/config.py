# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Options of the instrumentation: one data class for environment, arguments and config files.

A wrong value never stops anything: it is named in one warning and the default counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

_log = logging.getLogger(__package__)

PREFIX: Final = "OTEL_INSTRUMENTATION_TUNIX_"
SPAN_GROUPS: Final = ("run", "train", "eval", "checkpoint", "compile")
PROCESSES: Final = ("zero", "all", "errors")


@dataclass(frozen=True)
class Options:
    """What a user may choose; None is "not given here".

    The names are those of the keyword arguments of `instrument()`, of the keys in a declarative
    configuration file, and in upper case those of the environment variables.

    Attributes:
        span_groups: Groups of spans to emit, of `SPAN_GROUPS`.
        trace_per_step: Whether each step is a trace of its own; "auto" lets the run decide.
        processes: Which JAX processes emit, of `PROCESSES`.
        run_id: Value of `tunix.run.id`; None for the launcher's job id or a random one.
        step_events: Whether to emit `tunix.training.step_completed`.
        device_time: Whether to watch for the end of device work.
    """

    span_groups: Collection[str] | None = None
    trace_per_step: bool | str | None = None
    processes: str | None = None
    run_id: str | None = None
    step_events: bool | None = None
    device_time: bool | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            try:
                parsed = _PARSERS[field.name](value)
            except Exception as error:  # the value may be any object
                _log.warning("%s=%s is ignored: %s.", field.name, _shown(value), error)
                parsed = None
            object.__setattr__(self, field.name, parsed)

    @classmethod
    def load(cls, given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """Options of one `instrument()` call: arguments before environment before defaults.

        Args:
            given: Keyword arguments; those that are no options are somebody else's.
            environ: Environment.

        Returns:
            Options in which only `trace_per_step` and `run_id` may be None.
        """
        names = [field.name for field in fields(cls)]
        environment: Mapping[str, Any] = {
            name: environ.get(PREFIX + name.upper()) or None for name in names
        }
        options = cls(span_groups=SPAN_GROUPS, processes="zero", step_events=True, device_time=True)
        for source in (environment, given):
            raw: dict[str, Any] = {name: source.get(name) for name in names}
            chosen = cls(**raw)
            found = {name: getattr(chosen, name) for name in names}
            options = replace(options, **{n: v for n, v in found.items() if v is not None})
        return (
            replace(options, trace_per_step=None) if options.trace_per_step == "auto" else options
        )


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    if str(value).strip().lower() not in words:
        raise ValueError("true or false is expected")
    return words[str(value).strip().lower()]


def _tristate(value: Any) -> bool | str:
    return "auto" if str(value).strip().lower() == "auto" else _boolean(value)


def _groups(value: Any) -> frozenset[str]:
    items = value.split(",") if isinstance(value, str) else list(value)
    groups = frozenset(str(item).strip().lower() for item in items) - {""}
    unknown = groups.difference(SPAN_GROUPS)
    if unknown:
        raise ValueError(f"{sorted(unknown)} is none of {list(SPAN_GROUPS)}")
    return groups


def _policy(value: Any) -> str:
    policy = str(value).strip().lower()
    if policy not in PROCESSES:
        raise ValueError(f"one of {list(PROCESSES)} is expected")
    return policy


def _identifier(value: Any) -> str:
    text = str(value).strip().encode("utf-8", "backslashreplace").decode()
    if not text:
        raise ValueError("a run id has at least one character")
    return text


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "span_groups": _groups,
    "trace_per_step": _tristate,
    "processes": _policy,
    "run_id": _identifier,
    "step_events": _boolean,
    "device_time": _boolean,
}
