# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of `tunix.sft`."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Before JAX is imported: a CPU backend of four devices, so that arrays can be sharded.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # value_cases

import jax
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tunix.sft import _scalars
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions


@pytest.fixture(autouse=True, scope="session")
def _backend() -> None:
    """Most tests are about a process that has a JAX backend."""
    jax.devices()


class Exported:
    """What an in-memory reader collects, as plain dicts."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)

    def points(self) -> dict[str, list[tuple[dict[str, Any], float]]]:
        """Instrument name to (attributes, value) of each point."""
        data = self.reader.get_metrics_data()
        points: dict[str, list[tuple[dict[str, Any], float]]] = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points.setdefault(metric.name, []).extend(
                        (dict(point.attributes), point.value) for point in metric.data.data_points
                    )
        return points

    def values(self) -> dict[str, float]:
        """Instrument name to value, where each has one point."""
        points = self.points()
        assert all(len(found) == 1 for found in points.values()), points
        return {name: found[0][1] for name, found in points.items()}

    def scopes(self) -> set[tuple[str, str]]:
        """(name, version) of the instrumentation scopes."""
        data = self.reader.get_metrics_data()
        return {
            (scope.scope.name, scope.scope.version)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
        }


@pytest.fixture
def exported() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.provider.shutdown()


@pytest.fixture
def make_logger(exported: Exported) -> Iterator[Callable[..., MetricsLogger]]:
    """Makes loggers on `exported`, with options as keyword arguments."""
    made: list[MetricsLogger] = []

    def make(**options: Any) -> MetricsLogger:
        made.append(MetricsLogger(MetricsLoggerOptions(**options), meter_provider=exported.provider))
        return made[-1]

    yield make
    for logger in made:
        logger.close()


@pytest.fixture
def logger(make_logger: Callable[..., MetricsLogger]) -> MetricsLogger:
    return make_logger()


class FakeArray:
    """Stands in for a `jax.Array` whose computation the test ends: deterministic and portable.

    As with the real one, asking the caller's object whether it is ready after it was deleted would
    end the process; here it fails the test.
    """

    def __init__(self, value: Any = 1.5, *, ready: bool = False, platform: str = "tpu") -> None:
        import numpy as np

        self.value = np.asarray(value, np.float32)
        self.dtype = self.value.dtype
        self.shape = self.value.shape
        self.size = self.value.size
        self.is_fully_replicated = True
        self.is_fully_addressable = True
        self.done = ready
        self.deleted = False
        self.error: Exception | None = None
        self.copies = 0
        self.waits = 0
        self.platform = platform
        self.handles: list[FakeHandle] = []

    def addressable_data(self, index: int) -> FakeHandle:
        if self.deleted:
            raise RuntimeError("deleted")
        self.handles.append(FakeHandle(self))
        return self.handles[-1]

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        raise AssertionError("is_ready() on the caller's array can end the process")

    def finish(self, error: Exception | None = None) -> None:
        self.error = error
        self.done = True

    def delete(self) -> None:
        self.deleted = True


class FakeHandle:
    """What `addressable_data` returns: an object of its own on the same buffer."""

    def __init__(self, array: FakeArray) -> None:
        self.array = array
        self.dtype, self.size, self.shape = array.dtype, array.size, array.shape
        self.device = array

    def is_deleted(self) -> bool:
        return self.array.deleted

    def is_ready(self) -> bool:
        if self.array.deleted:
            raise RuntimeError("deleted")
        return self.array.done

    def copy_to_host_async(self) -> None:
        self.array.copies += 1

    def block_until_ready(self) -> None:
        self.array.waits += 1
        self.array.finish()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        assert self.array.done, "a conversion would have waited for the device"
        if self.array.deleted:
            raise RuntimeError("deleted")
        if self.array.error is not None:
            raise self.array.error
        return self.array.value


@pytest.fixture
def fake_array(monkeypatch: pytest.MonkeyPatch) -> type[FakeArray]:
    monkeypatch.setitem(_scalars._readers, FakeArray, _scalars._device_array)
    return FakeArray
