# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the metrics logger share: a reader, arrays that wait, child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tunix.sft import _scalars

Key = tuple[str, str]


class Reader:
    """A provider and its data points, each batch encoded on the way as for OTLP."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])
        self.scopes: set[tuple[str, str | None]] = set()

    def points(self) -> list[tuple[str, float, dict[str, Any]]]:
        """Name, value and attributes of all data points of scope `tunix`, encoded and decoded."""
        data = self._reader.get_metrics_data()
        if data is None or not data.resource_metrics:
            return []
        points = []
        for resource in encode_metrics(data).resource_metrics:
            for scope in resource.scope_metrics:
                self.scopes.add((scope.scope.name, scope.scope.version))
                for metric in scope.metrics if scope.scope.name == "tunix" else ():
                    kind = getattr(metric, str(metric.WhichOneof("data")))
                    for point in kind.data_points:
                        value = getattr(point, point.WhichOneof("value"))
                        pairs = ((p.key, p.value) for p in point.attributes)
                        found = {k: getattr(v, v.WhichOneof("value")) for k, v in pairs}
                        points.append((metric.name, value, found))
        return points

    def values(self, mode: str = "train", prefix: str = "") -> dict[Key, float]:
        """Values by metric name and by the key that was logged, "" for the project's own."""
        found = {}
        for name, value, attributes in self.points():
            if attributes["tunix.training.mode"] == mode:
                if attributes.get("tunix.metrics.prefix", "") == prefix:
                    key = (name, attributes.get("tunix.metrics.name", ""))
                    assert key not in found
                    found[key] = value
        return found

    def value(self, name: str, key: str = "", mode: str = "train", prefix: str = "") -> Any:
        """One value; None when there is none."""
        return self.values(mode, prefix).get((name, key))


class HeldArray:
    """A `jax.Array` that is not computed before `release`: the same methods on a real one."""

    def __init__(self, value: float, *, error: Exception | None = None) -> None:
        self._array = jnp.asarray(value, jnp.float32)
        self._computed = threading.Event()
        self._error = error
        self.waited = False

    def release(self) -> None:
        self._computed.set()

    def is_ready(self) -> bool:
        return self._computed.is_set()

    def addressable_data(self, index: int) -> HeldArray:
        return self

    def copy_to_host_async(self) -> None:
        pass

    def block_until_ready(self) -> HeldArray:
        self.waited = True
        assert self._computed.wait(20)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        assert self._computed.is_set(), "read before it was computed"
        if self._error is not None:
            raise self._error
        return self._array.__array__(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


# Which reader a type gets is decided once; the compiled `jax.Array` admits no subclass.
_scalars._readers[HeldArray] = _scalars._device_array


def run(script: str, folder: Path, *, timeout: float = 60.0, **env: str) -> str:
    """Runs a script in a process of its own and returns its output; a crash or a hang fails."""
    path = folder / "script.py"
    path.write_text(script, "utf-8")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON", "XLA_"))}
    result = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**kept, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout
