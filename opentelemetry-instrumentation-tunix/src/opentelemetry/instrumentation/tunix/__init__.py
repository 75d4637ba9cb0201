# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry instrumentation for `Tunix`_, the JAX library for LLM post-training.

Without a line of code::

    opentelemetry-instrument python train.py

In a script or a notebook, before or after ``import tunix``::

    from opentelemetry.instrumentation.tunix import TunixInstrumentor

    TunixInstrumentor().instrument()

Both serve ``google-tunix`` 0.1.4 and newer, and ``tunix-core``. What is emitted is listed in
``docs/telemetry.md``: spans for the run, each train step with the time its device took, each
evaluation, each checkpoint that was written and each compilation of a step; the library's own
metrics as gauges and as one event a step; and where every second of a run went.

``instrument()`` takes ``tracer_provider``, ``meter_provider`` and ``logger_provider``; the global
ones are used for those not given, also when they are set later. Providers belong to the
application: they are never created, flushed or shut down here. Unknown arguments are ignored.

Neither importing this package nor calling ``instrument()`` imports Tunix or JAX or initialises a
JAX backend, so ``jax.distributed.initialize`` and ``JAX_PLATFORMS`` work as before.
``uninstrument()`` restores every class exactly; objects made before fall silent.

.. _Tunix: https://github.com/google/tunix
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import (  # pyright: ignore[reportMissingTypeStubs]
    BaseInstrumentor,
)

from . import library, metrics, patching, telemetry, training
from .config import Options
from .targets import TARGETS
from .version import __version__

__all__ = ["TunixInstrumentor", "__version__"]


class TunixInstrumentor(BaseInstrumentor):
    """Switches the instrumentation of Tunix on and off; see the module's docstring."""

    # A declarative configuration file fills this and hands its fields to instrument().
    configuration = Options

    def instrumentation_dependencies(self) -> Collection[str]:
        """The requirement of the Tunix that is installed, or both where none is."""
        return library.required()

    def _instrument(self, **kwargs: Any) -> None:
        # An exception here would abort every instrumentor that comes after this one.
        try:
            telemetry.activate(
                telemetry.Telemetry(
                    Options.load(kwargs),
                    tracer_provider=kwargs.get("tracer_provider"),
                    meter_provider=kwargs.get("meter_provider"),
                    logger_provider=kwargs.get("logger_provider"),
                )
            )
            patching.apply(TARGETS)
        except Exception:
            telemetry.report_failure("instrumenting Tunix")

    def _uninstrument(self, **_: Any) -> None:
        patching.restore()
        stopped = telemetry.activate(None)
        if stopped is not None:
            training.stop()
            metrics.stop(stopped)
            stopped.silence()
