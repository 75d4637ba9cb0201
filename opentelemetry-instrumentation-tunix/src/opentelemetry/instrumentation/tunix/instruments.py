# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Histograms and counters of the instrumentation, one set for each meter provider."""

from __future__ import annotations

import weakref
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider

from . import semconv
from ._instruments import api
from .version import __version__

# From milliseconds to hours: a step of a toy model, and one of a large one behind a compilation.
_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 10800.0),
)


class Instruments:
    """What is measured; see `semconv` for what each is."""

    def __init__(self, provider: MeterProvider) -> None:
        self._meter = metrics.get_meter(semconv.SCOPE, __version__, provider, semconv.SCHEMA_URL)
        self.train_duration = self._histogram(
            semconv.TRAIN_DURATION, "Train step, from its call to its end on the device."
        )
        self.train_device_duration = self._histogram(
            semconv.TRAIN_DEVICE_DURATION, "Train step, work of the device."
        )
        self.compile_duration = self._histogram(
            semconv.COMPILE_DURATION, "Tracing, lowering and compiling a function."
        )
        self.compilations = self._meter.create_counter(
            semconv.COMPILATIONS, "{compilation}", "Functions compiled."
        )
        self.time = self._meter.create_counter(
            semconv.TIME, "s", "Wall time of runs by what it was spent on."
        )

    def _histogram(self, name: str, description: str) -> metrics.Histogram:
        return self._meter.create_histogram(
            name, "s", description, explicit_bucket_boundaries_advisory=_SECONDS
        )


_cache: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


def is_provided(provider: MeterProvider | None) -> bool:
    """Whether there is anything to measure for: a provider was given, or a global one is set."""
    return provider is not None or api._METER_PROVIDER is not None


def instruments_of(provider: MeterProvider | None) -> Instruments | None:
    """The instruments of a provider, of the global one for None.

    Returns:
        None where nothing is measured. The API's stand-in for a provider that is set later counts
        as nothing: what was made through it would be made a second time by that provider.
    """
    if not is_provided(provider):
        return None
    provider = provider or metrics.get_meter_provider()
    if f"{type(provider).__module__}.".startswith("opentelemetry.metrics."):
        return None
    try:
        found = _cache.get(provider)
        if found is None:
            found = _cache[provider] = Instruments(provider)
    except TypeError:  # neither hashable nor weakly referable: not shared
        return Instruments(provider)
    return found
