# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of `tunix.sft`."""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Before JAX is imported: a CPU backend of four devices, so that arrays can be sharded.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # value_cases
sys.path.append(str(pathlib.Path(__file__).parent))  # small_runs

import jax
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_SPEC = importlib.util.find_spec("tunix")
if _SPEC and pathlib.Path(str(_SPEC.origin)).with_name("sft").joinpath("_gauges.py").exists():
    from tunix.sft import _scalars
    from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions
else:  # an environment that tests google-tunix, which has a `tunix.sft` of its own
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _backend() -> None:
    """Most tests are about a process that has a JAX backend."""
    jax.devices()


class Exported:
    """What an in-memory reader collects, as plain dicts.

    SDKs before 1.45 leave out a gauge that was not set since the last collection; here its last
    value stands, as on a dashboard.
    """

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self._scopes: set[tuple[str, str | None]] = set()
        self._last: dict[str, dict[frozenset[Any], tuple[dict[str, Any], float]]] = {}

    def points(self) -> dict[str, list[tuple[dict[str, Any], float]]]:
        """Instrument name to (attributes, value) of each point."""
        data = self.reader.get_metrics_data()
        encode_metrics(data or MetricsData([]))  # one value that does not encode costs the batch
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                self._scopes.add((scope.scope.name, scope.scope.version))
                for metric in scope.metrics:
                    last = self._last.setdefault(metric.name, {})
                    for point in metric.data.data_points:
                        attributes = dict(point.attributes or {})
                        last[frozenset(attributes.items())] = (attributes, point.value)
        return {name: list(last.values()) for name, last in self._last.items() if last}

    def values(self) -> dict[str, float]:
        """Instrument name to value, where each has one point."""
        points = self.points()
        assert all(len(found) == 1 for found in points.values()), points
        return {name: found[0][1] for name, found in points.items()}

    def value(self, name: str, **attributes: Any) -> float | None:
        """Value of the point with (at least) these attributes, dots written as `__`."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        found = [v for a, v in self.points().get(name, ()) if wanted.items() <= a.items()]
        assert len(found) < 2, found
        return found[0] if found else None

    def scopes(self) -> set[tuple[str, str | None]]:
        """(name, version) of the instrumentation scopes."""
        self.points()
        return self._scopes


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
        made.append(
            MetricsLogger(MetricsLoggerOptions(**options), meter_provider=exported.provider)
        )
        return made[-1]

    yield make
    for logger in made:
        logger.close()


@pytest.fixture
def logger(make_logger: Callable[..., MetricsLogger]) -> MetricsLogger:
    return make_logger()


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def make(spans: InMemorySpanExporter) -> Callable[..., MetricsLogger]:
    """Makes loggers with a tracer provider, with options as keyword arguments."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return lambda **options: MetricsLogger(
        MetricsLoggerOptions(**options), tracer_provider=provider
    )


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Records of `tunix.events` from INFO on."""
    found: list[logging.LogRecord] = []
    events = logging.getLogger("tunix.events")
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    events.addHandler(handler)
    events.setLevel(logging.INFO)
    yield found
    events.setLevel(logging.NOTSET)
    events.removeHandler(handler)


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


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Warnings so far on a Python logger and those below it."""
    caplog.set_level(logging.WARNING)
    return lambda name: [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and f"{r.name}.".startswith(f"{name}.")
    ]


@pytest.fixture
def run_script(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Runs a script in a process of its own and returns its output; a crash or a hang fails."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON"))}

    def run(script: str, *, timeout: float = 100.0) -> str:
        path = tmp_path / "script.py"
        path.write_text(script, "utf-8")
        result = subprocess.run(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env=inherited,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run


def pytest_configure(config: pytest.Config) -> None:
    """Lets pass what qwix warns about: it calls what later releases of flax deprecate."""
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:(flax|qwix)\.")
