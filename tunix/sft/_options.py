# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Options of a `MetricsLogger`."""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import os
import warnings
from collections.abc import Mapping
from typing import Any, Final, Self

import numpy as np

from tunix.sft._series import utf8

_log = logging.getLogger(__name__)

Attribute = str | bool | int | float

_FLAGS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_REMEDIES: Final = {
    "enable_opentelemetry": "say enabled=True or enabled=False instead",
    "otel_meter_provider": "pass meter_provider to MetricsLogger instead",
    "metric_prefix": "pass metrics_prefix to MetricsLogger.log instead",
}


@dataclasses.dataclass
class MetricsLoggerOptions:
    """Options of a `MetricsLogger`: plain data that copies, pickles and compares.

    Values may be what a YAML file or a command line yields: "false" is False, null the default.
    Exporters are not configured here: they belong to the OpenTelemetry SDK of the application.

    Attributes:
        log_dir: Folder of the trajectory files of agentic RL; no metric is written there.
        project_name: Kept for configuration files; the Resource is where such facts belong.
        run_name: As project_name.
        flush_every_n_steps: Kept for configuration files; the reader's interval decides.
        backend_kwargs: Deprecated; warned about and dropped.
        enabled: False emits nothing at all; the history works.
        emit_on_all_processes: Whether processes other than 0 emit too, each with its
            `tunix.jax.process.index`.
        attributes: Added to every gauge, span and event: few different values, no ids. Keys
            that begin with `tunix.` are the library's and dropped.
        backend_factories: Deprecated; warned about and dropped.

    Raises:
        ValueError: An unknown option, or a value that cannot be what the option needs.
    """

    log_dir: str | None = None
    project_name: str = "tunix"
    run_name: str = ""
    flush_every_n_steps: int = 100
    backend_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    enabled: bool = True
    emit_on_all_processes: bool = False
    attributes: dict[str, Attribute] = dataclasses.field(default_factory=dict)
    backend_factories: Any = None

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuses unknown options with the name and the remedy, which `__init__` would not."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options.keys() - known:
            remedy = _REMEDIES.get(name, f"the options are {', '.join(sorted(known))}")
            raise ValueError(f"unknown metrics logging option {name!r}: {remedy}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.log_dir = _path("log_dir", self.log_dir)
        self.project_name = _text("project_name", self.project_name, "tunix")
        self.run_name = _text("run_name", self.run_name, "")
        self.flush_every_n_steps = _positive("flush_every_n_steps", self.flush_every_n_steps, 100)
        self.enabled = _flag("enabled", self.enabled, default=True)
        self.emit_on_all_processes = _flag(
            "emit_on_all_processes", self.emit_on_all_processes, default=False
        )
        self.attributes = _attributes(self.attributes)
        if self.backend_kwargs or self.backend_factories:
            warnings.warn(
                "backend_kwargs and backend_factories configure nothing any more: metrics go "
                "where the application's OpenTelemetry SDK sends them, so exporters belong there "
                "(or in the OTEL_* environment of opentelemetry-instrument)",
                DeprecationWarning,
                stacklevel=3,
            )
        # Dropped: back ends do not copy or pickle, and a copy of the options must not warn again.
        self.backend_kwargs = {}
        self.backend_factories = None


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path, got {value!r}")
    return str(os.fspath(value))


def _flag(name: str, value: Any, *, default: bool) -> bool:
    if value is None:
        return default
    if isinstance(value, bool | np.bool_):
        return bool(value)
    flag = _FLAGS.get(str(value).strip().lower())
    if flag is None:
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return flag


def _text(name: str, value: Any, default: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str | int):
        raise ValueError(f"{name} must be text, got {value!r}")
    return str(value)


def _positive(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return number


def _attributes(attributes: Mapping[str, Any] | None) -> dict[str, Attribute]:
    if attributes is None:
        return {}
    if not isinstance(attributes, Mapping):
        raise ValueError(f"attributes must be a mapping, got {attributes!r}")
    kept: dict[str, Attribute] = {}
    for key, value in attributes.items():
        if not isinstance(key, str) or not key:
            raise ValueError(f"attributes must have text as keys, got {key!r}")
        if key.startswith("tunix."):
            _log.warning("attribute %r is dropped: keys below `tunix.` are the library's own", key)
            continue
        kept[utf8(key)] = _attribute(key, value)
    return kept


def _attribute(key: str, value: Any) -> Attribute:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return utf8(value)
    fits = isinstance(value, float) and math.isfinite(value)
    if fits or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    raise ValueError(
        f"attribute {key!r} must be text, bool, int64 or a finite float, got {value!r}"
    )
