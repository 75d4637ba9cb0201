# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The logger against a model made of plain lists, over any sequence of calls."""

from __future__ import annotations

import decimal
import fractions
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from value_cases import NOT_KEPT, VALUE_CASES, same

from tunix.sft import _gauges, _scalars
from tunix.sft.metrics_logger import MetricsLogger, Mode

Key = tuple[str, str, str]

NAMES = {"loss": "tunix.training.loss", "rewards/a": "tunix.rewards.a", "time": "tunix.custom.time"}


class Device:
    """A device value that becomes ready, or is lost, when the machine says so."""

    dtype = np.dtype(np.float32)
    size, shape = 1, ()
    is_fully_replicated = is_fully_addressable = True

    def __init__(self, value: float) -> None:
        self.value = value
        self.done = self.deleted = False
        self.device = self
        self.platform = "tpu"

    def addressable_data(self, index: int) -> Device:
        return self

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        if self.deleted:
            raise RuntimeError
        return self.done

    def copy_to_host_async(self) -> None:
        pass

    def block_until_ready(self) -> None:
        self.done = True

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        assert self.done
        if self.deleted:
            raise RuntimeError
        return np.float32(self.value)


_scalars._readers[Device] = _scalars._device_array

# When a value that JAX itself still computes goes out is not known here; `Device` stands for it.
TABLE = [case for case in VALUE_CASES if "pending" not in case.name and case.kept is not NOT_KEPT]
float32 = st.floats(width=32)
# A value, what the history keeps for it and the number it counts as; None for no number.
values: st.SearchStrategy[tuple[Any, Any, float | None]] = st.one_of(
    st.floats().map(lambda v: (v, v, v)),
    float32.map(lambda v: (np.float32(v), v, v)),
    float32.map(lambda v: (np.full((1, 1), v, np.float32), v, v)),
    float32.map(lambda v: (jnp.float32(v), v, v)),
    st.integers(-(2**53), 2**53).map(lambda v: (v, float(v), float(v))),
    st.integers(2**62, 2**70).map(lambda v: (2 * v + 1, 2 * v + 1, float(2 * v + 1))),
    st.booleans().map(lambda v: (v, float(v), float(v))),
    st.decimals(-9, 9, places=2).map(lambda v: (decimal.Decimal(v), float(v), float(v))),
    st.fractions(-9, 9).map(lambda v: (fractions.Fraction(v), float(v), float(v))),
    st.text(max_size=3).map(lambda v: (v, v, None)),
    st.just((None, None, None)),
    st.just((1j, 1j, None)),
    st.just(({"a": [1]}, {"a": [1]}, None)),
    st.sampled_from(TABLE).map(lambda case: (case.make(), case.kept, case.number)),
)
steps = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(2**63, 2**80), st.none())


class LoggerMachine(RuleBasedStateMachine):
    """Logs, reads, finishes and loses device values, closes; compares after each step."""

    @initialize()
    def start(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.logger = MetricsLogger(meter_provider=self.provider)
        self.closed = False
        self.exported: dict[tuple[str, ...], float] = {}
        # In log order: key, kept, number, step, device value.
        self.entries: list[tuple[Key, Any, float | None, int | None, Device | None]] = []

    @rule(
        prefix=st.sampled_from(["", "actor"]),
        name=st.sampled_from(sorted(NAMES)),
        mode=st.sampled_from([Mode.TRAIN, "train", Mode.EVAL]),
        value=values,
        step=steps,
    )
    def log(self, prefix: str, name: str, mode: str, value: Any, step: int | None) -> None:
        logged, kept, number = value
        self.logger.log(prefix, name, logged, mode, step)  # type: ignore[arg-type]
        self.entries.append(((prefix, name, str(mode)), kept, number, step, None))

    @rule(
        prefix=st.sampled_from(["", "actor"]),
        name=st.sampled_from(sorted(NAMES)),
        value=float32,
        step=steps,
    )
    def log_device_value(self, prefix: str, name: str, value: float, step: int | None) -> None:
        device = Device(value)
        self.logger.log(prefix, name, device, Mode.TRAIN, step)  # type: ignore[arg-type]
        self.entries.append(((prefix, name, "train"), value, value, step, device))

    def _waiting(self) -> list[Device]:
        return [d for *_, d in self.entries if d is not None and not d.done and not d.deleted]

    @precondition(lambda self: self._waiting())
    @rule(data=st.data(), lost=st.booleans())
    def end(self, data: st.DataObject, lost: bool) -> None:
        device = data.draw(st.sampled_from(self._waiting()))
        if lost:
            device.deleted = True
        else:
            device.done = True
        self.logger.peek_metric("", "nothing", "train")
        if lost:
            self._lose(device)

    def _lose(self, device: Device) -> None:
        self.entries = [
            (key, math.nan, math.nan, step, d) if d is device else (key, kept, number, step, d)
            for key, kept, number, step, d in self.entries
        ]

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([entry[0] for entry in self.entries]))
        mine = [(kept, number) for k, kept, number, *_ in self.entries if k == key]
        history = self.logger.get_metric_history(*key)
        assert len(history) == len(mine)
        assert all(same(got, kept) for got, (kept, _) in zip(history, mine, strict=True))
        numbers = [number for _, number in mine if number is not None]
        mean = self.logger.get_metric(*key)
        assert isinstance(mean, np.float64)
        assert _close(mean, numbers)

    @rule()
    def close(self) -> None:
        self.logger.close()
        if not self.closed:
            self.closed = True
            self.emitted = self._expected(self.entries)

    def teardown(self) -> None:
        """What was known at the end is exported, and nothing is left to be said at exit."""
        if hasattr(self, "logger"):
            self.close()
            self.gauges_show_what_is_known()
            self.provider.shutdown()

    @invariant()
    def gauges_show_what_is_known(self) -> None:
        if not hasattr(self, "logger"):
            return
        expected = self.emitted if self.closed else self._expected(self._known())
        _collect(self.reader, self.exported)
        assert self.exported == expected

    def _known(self) -> list[Any]:
        """Entries up to the first in their prefix and mode that is not computed."""
        known, stopped = [], set()
        for entry in self.entries:
            (prefix, _, mode), *_, device = entry
            if device is not None and not device.done and not device.deleted:
                stopped.add((prefix, mode))
            if (prefix, mode) not in stopped:
                known.append(entry)
        return known

    @staticmethod
    def _expected(entries: list[Any]) -> dict[tuple[str, ...], float]:
        expected: dict[tuple[str, ...], float] = {}
        for (prefix, name, mode), _, number, step, _device in entries:
            if number is None:
                continue
            if math.isfinite(number):
                expected[NAMES[name], prefix, mode] = number
            else:
                counted = ("tunix.training.nonfinite", prefix, mode, name)
                expected[counted] = expected.get(counted, 0) + 1
            if step is not None and -(2**63) <= step < 2**63:
                expected["tunix.training.step", prefix, mode] = step
        return expected


def _collect(reader: InMemoryMetricReader, found: dict[tuple[str, ...], float]) -> None:
    """Adds what is exported; older SDKs leave out a gauge that was not set since."""
    data = reader.get_metrics_data()
    encode_metrics(data or MetricsData([]))
    for resource in data.resource_metrics if data else ():
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.data.data_points:
                known: Any = point.attributes or {}
                key = (metric.name, known.get("tunix.metrics.prefix", ""))
                key += (known["tunix.training.mode"],)
                if metric.name.endswith("nonfinite"):
                    key += (known["tunix.metrics.name"],)
                found[key] = point.value


def _close(mean: float, numbers: list[float]) -> bool:
    if not numbers or any(map(math.isnan, numbers)):
        return math.isnan(mean)
    try:
        exact = math.fsum(numbers) / len(numbers)
    except OverflowError:  # on the way; the running sum is infinite, or NaN, or neither
        return True
    except ValueError:  # Inf and -Inf
        return math.isnan(mean)
    scale = max(map(abs, numbers))
    if not math.isfinite(scale):
        return mean == exact or math.isnan(mean)
    running = sum(numbers)
    if not math.isfinite(running):
        return True
    return abs(mean - exact) <= 1e-9 * scale


TestLogger = LoggerMachine.TestCase
TestLogger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_model_knows_the_limits() -> None:
    """The machine stays below the number of series and waiting values that are bounded."""
    assert min(_gauges.MAX_SERIES, _gauges.MAX_WAITING) > 30
