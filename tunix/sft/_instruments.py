# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""How a logged key becomes a gauge, and one set of instruments for each meter provider.

This module exists twice, byte for byte; `_scalars.py` says why.
"""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import (
    Counter,
    MeterProvider,
    _Gauge,  # pyright: ignore[reportPrivateUsage]  the API exports its gauge under this name only
    _internal,  # pyright: ignore[reportPrivateUsage]
)

SCOPE: Final = "tunix"
STEP: Final = "tunix.training.step"
NONFINITE: Final = "tunix.training.nonfinite"

NAME: Final = "tunix.metrics.name"
PREFIX: Final = "tunix.metrics.prefix"
MODE: Final = "tunix.training.mode"
PROCESS_INDEX: Final = "tunix.jax.process.index"

WELL_KNOWN: Final = {
    "loss": "tunix.training.loss",
    "perplexity": "tunix.training.perplexity",
    "learning_rate": "tunix.training.learning_rate",
    "grad_norm": "tunix.training.gradient.norm",
}

# First words below `tunix.` that mean something else in this project's telemetry.
RESERVED: Final = frozenset(
    {
        *("custom", "device", "health", "jax", "jit", "library", "mesh", "metrics", "model"),
        *("rl", "role", "run", "time", "training"),
    }
)

# OpenTelemetry compares instrument names without regard to case, so all are lower case.
_SEPARATOR: Final = re.compile(r"[^a-z0-9_-]+")
_LONGEST: Final = 255


def gauge_name(key: str) -> str:
    """The instrument name for a logged key.

    Lower-case ASCII letters, digits, `_` and `-` stay; any other run of characters separates
    words, which dots join below `tunix.`. A name that would have another meaning, or none, goes
    below `tunix.custom.`. Different keys may get one name; the attribute `tunix.metrics.name`
    keeps them apart.
    """
    known = WELL_KNOWN.get(key)
    if known is not None:
        return known
    words = [word for word in _SEPARATOR.split(key.lower()) if word]
    if not words:
        words = ["custom", "unnamed"]
    elif words[0] in RESERVED:
        words.insert(0, "custom")
    return ("tunix." + ".".join(words))[:_LONGEST].rstrip(".")


class Instruments:
    """The gauges and the counter of one meter provider, each created once in the process.

    Creating an instrument again is answered with a warning by older SDKs, and several loggers on
    one provider are the rule in reinforcement learning.
    """

    def __init__(self, provider: MeterProvider, version: str) -> None:
        self._meter = provider.get_meter(SCOPE, version)
        self._lock = threading.Lock()
        self._gauges: dict[str, _Gauge] = {}
        self._nonfinite: Counter | None = None

    def gauge(self, name: str) -> _Gauge:
        """The gauge of that name; the unit is known for the project's own names only."""
        with self._lock:
            gauge = self._gauges.get(name)
            if gauge is None:
                unit, text = _UNITS.get(name, ("", "Last value logged under the attribute's key."))
                gauge = self._gauges[name] = self._meter.create_gauge(name, unit, text)
            return gauge

    @property
    def nonfinite(self) -> Counter:
        """Counts what was logged and is no finite number."""
        with self._lock:
            if self._nonfinite is None:
                self._nonfinite = self._meter.create_counter(
                    NONFINITE, "{value}", "Logged values that are NaN, infinite or lost."
                )
            return self._nonfinite


_UNITS: Final = {
    STEP: ("{step}", "Step of the value logged last."),
    **dict.fromkeys(WELL_KNOWN.values(), ("1", "Last value that the training loop logged.")),
}
_cache_lock = threading.Lock()
_cache: weakref.WeakKeyDictionary[MeterProvider, dict[str, Instruments]] = (
    weakref.WeakKeyDictionary()
)


def instruments_of(provider: MeterProvider, version: str) -> Instruments | None:
    """The shared instruments of a provider.

    Returns:
        None for the providers that the API itself brings, which drop everything. Instruments made
        through its stand-in for a provider that is set later would be created a second time on
        that provider; a change of provider is noticed instead (`api`).
    """
    if f"{type(provider).__module__}.".startswith("opentelemetry.metrics."):
        return None
    with _cache_lock:
        try:
            versions = _cache.setdefault(provider, {})
        except TypeError:  # neither hashable nor weakly referable: not shared
            return Instruments(provider, version)
        if version not in versions:
            versions[version] = Instruments(provider, version)
        return versions[version]


class _PublicApi:
    """Stands in where a future API keeps its global provider elsewhere."""

    @property
    def _METER_PROVIDER(self) -> MeterProvider:  # noqa: N802
        return metrics.get_meter_provider()


# `api._METER_PROVIDER` is the global provider, or None. The public function reads the environment
# at each call while none is set, at ten times the cost of all that a call of `log` does then; this
# only answers "is it still the same?".
api: Any = _internal if hasattr(_internal, "_METER_PROVIDER") else _PublicApi()


def reset_locks_in_child() -> None:
    """Replaces locks that another thread may have held while the process was forked."""
    global _cache_lock
    _cache_lock = threading.Lock()
    for versions in list(_cache.values()):
        for instruments in versions.values():
            instruments._lock = threading.Lock()  # pyright: ignore[reportPrivateUsage]
