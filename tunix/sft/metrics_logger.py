# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Training metrics: a local history, and OpenTelemetry for everybody else.

    logger = MetricsLogger(MetricsLoggerOptions(attributes={"team": "alignment"}))
    logger.log("actor", "loss", loss, Mode.TRAIN, step)  # never waits, never raises
    logger.get_metric("actor", "loss", Mode.TRAIN)       # mean so far

The application sets up the OpenTelemetry SDK, or starts under `opentelemetry-instrument`; without
one the history works alone. Nothing here creates, flushes or shuts down a provider.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
from opentelemetry import trace
from opentelemetry.metrics import MeterProvider

import tunix
from tunix.sft._gauges import GaugeStream
from tunix.sft._history import History, new_history
from tunix.sft._instruments import SCOPE
from tunix.sft._options import MetricsLoggerOptions
from tunix.sft._series import Series
from tunix.sft._signals import Signals

__all__ = ["MetricsLogger", "MetricsLoggerOptions", "Mode"]


class Mode(enum.StrEnum):
    """What a value was measured in; the plain strings do as well."""

    TRAIN = "train"
    EVAL = "eval"


class MetricsLogger:
    """Keeps every logged value and emits the latest ones as OpenTelemetry gauges.

    `loss`, `perplexity`, `learning_rate` and `grad_norm` have gauges of their own below
    `tunix.training`; any other key becomes `tunix.<key>` with the key as attribute
    `tunix.metrics.name`. The step is the gauge `tunix.training.step`.

    All methods may be called from any thread. A copy (`copy.copy`, `copy.deepcopy`) is a logger of
    its own with the same options, the same providers and a copy of the history. A logger pickles
    when its providers are the global ones; options always do.

    Args:
        metrics_logger_options: None for the defaults.
        meter_provider: Where gauges go; None for the global provider, also when it is set later.
        tracer_provider: Where spans go; None for the global provider.
    """

    def __init__(
        self,
        metrics_logger_options: MetricsLoggerOptions | None = None,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: trace.TracerProvider | None = None,
    ) -> None:
        options = metrics_logger_options or MetricsLoggerOptions()
        self._options = options
        self._providers = (meter_provider, tracer_provider)
        self._stream = GaugeStream(
            tunix.__version__,
            meter_provider=meter_provider,
            attributes=options.attributes,
            all_processes=options.emit_on_all_processes,
            enabled=options.enabled,
            keep=new_history,
        )
        self._log = self._stream.log
        self._signals = Signals(
            self._stream,
            trace.get_tracer(SCOPE, tunix.__version__, tracer_provider),
            options.attributes,
            all_processes=options.emit_on_all_processes,
        )

    def log(
        self,
        metrics_prefix: str,
        metric_name: str,
        scalar_value: float | np.ndarray,
        mode: Mode | str,
        step: int,
    ) -> None:
        """Logs one value; returns at once and never raises.

        A device value that is not computed yet is not waited for: it is kept and emitted, in log
        order, by a later call. What is no number is kept and not emitted, with one warning.

        Args:
            metrics_prefix: "actor", "critic", ..., "" for none.
            metric_name: The key. A program logs a few hundred different ones, not one per sample.
            scalar_value: A number of any kind: Python, numpy, JAX (on the device too).
            mode: Train or eval.
            step: The step that the value belongs to.
        """
        self._log(metrics_prefix, metric_name, scalar_value, mode, step)

    def metric_exists(self, metrics_prefix: str, metric_name: str, mode: Mode | str) -> bool:
        """Whether anything was logged under these names."""
        series = self._stream.find(metrics_prefix, metric_name, mode)
        return series is not None and (series.unresolved > 0 or len(_history(series)) > 0)

    def get_metric(self, metrics_prefix: str, metric_name: str, mode: Mode | str) -> np.float64:
        """The mean of all numbers logged so far, geometric for `perplexity`; O(1).

        Waits for values of this metric that the device has not computed yet.

        Returns:
            A float64 scalar, NaN where one of the numbers is NaN or none was a number.

        Raises:
            ValueError: Nothing was logged under these names.
        """
        history = self._settled(metrics_prefix, metric_name, mode)
        with self._stream.lock:
            return history.mean()

    def get_metric_history(
        self, metrics_prefix: str, metric_name: str, mode: Mode | str
    ) -> np.ndarray:
        """All values logged so far, in log order.

        Waits for values of this metric that the device has not computed yet.

        Returns:
            A new array of shape [n]: float64, or object where something else was logged too.

        Raises:
            ValueError: Nothing was logged under these names.
        """
        history = self._settled(metrics_prefix, metric_name, mode)
        with self._stream.lock:
            return history.values()

    def peek_metric(
        self, metrics_prefix: str, metric_name: str, mode: Mode | str
    ) -> np.float64 | None:
        """`get_metric` of the values that are there now: waits for nothing, None where none is."""
        self._stream.poll()
        series = self._stream.find(metrics_prefix, metric_name, mode)
        if series is None or not len(_history(series)):
            return None
        with self._stream.lock:
            return _history(series).mean()

    def span(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[trace.Span]:
        """A span around a `with` block of the application.

        The span is current inside the block; an exception is recorded, sets the status and passes
        on. Where this process does not emit, the block gets a span that records nothing.

            with logger.span("data.load", {"shard": 3}):
                ...
        """
        return self._signals.span(name, attributes)

    def event(
        self,
        name: str,
        body: object = None,
        attributes: Mapping[str, Any] | None = None,
        severity: int = logging.INFO,
    ) -> None:
        """Logs an event through `logging.getLogger("tunix.events")`; never raises.

        Levels and handlers are the application's: by default INFO records of a library are dropped.

        Args:
            name: The event's name, the record attribute `event.name`.
            body: The message; None for the name.
            attributes: Record attributes. A key that a log record has itself gets a trailing
                underscore (`name` becomes `name_`).
            severity: A level of the `logging` module.
        """
        self._signals.event(name, body, attributes, severity)

    def close(self) -> None:
        """Emits what still waits, waiting for the device, and no gauge after that.

        The history goes on working, and so do `span` and `event`. Providers stay untouched, so a
        reader may go on exporting the last values. A second call changes nothing.
        """
        self._stream.close()

    def _settled(self, prefix: str, name: str, mode: Mode | str) -> History:
        series = self._stream.find(prefix, name, mode)
        if series is not None:
            self._stream.settle(series)
            if len(_history(series)):
                return _history(series)
        raise ValueError(
            f"no metric {name!r} with prefix {prefix!r} was logged in mode {str(mode)!r}"
        )

    # Copies -------------------------------------------------------------------------------------

    def __copy__(self) -> MetricsLogger:
        new = type(self)(
            self._options, meter_provider=self._providers[0], tracer_provider=self._providers[1]
        )
        new._adopt(self._snapshot())
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricsLogger:
        new = memo[id(self)] = self.__copy__()
        new._options = copy.deepcopy(self._options, memo)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        if self._providers != (None, None):
            raise TypeError(
                "a MetricsLogger with a meter_provider or tracer_provider of its own cannot be "
                "pickled: providers belong to one process. Pickle its options and make a logger "
                "there."
            )
        return type(self), (self._options,), self._snapshot()

    def __setstate__(self, state: dict[tuple[str, str, str], History]) -> None:
        self._adopt(state)

    def _snapshot(self) -> dict[tuple[str, str, str], History]:
        self._stream.settle()
        with self._stream.lock:
            return {(s.prefix, s.name, s.mode): _history(s).copy() for s in self._stream}

    def _adopt(self, histories: Mapping[tuple[str, str, str], History]) -> None:
        for key, history in histories.items():
            series = self._stream.series_of(*key)
            if series is not None:
                series.store = history


def _history(series: Series) -> History:
    return cast("History", series.store)
