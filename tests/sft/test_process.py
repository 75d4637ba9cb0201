# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The logger in processes of its own: JAX backends, exit, late providers, forks, no SDK."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tunix
from tunix.sft import _process

# Prints what is exported, at each export, as one line of JSON.
PROVIDER = f"""
import json, sys
sys.path.insert(0, {str(Path(tunix.__file__).parents[1])!r})
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

class Exporter(MetricExporter):
    def export(self, data, timeout_millis=0, **kwargs):
        values = {{
            metric.name: point.value
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }}
        print(json.dumps(values), flush=True)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self, timeout_millis=0, **kwargs):
        pass

def provider():
    return MeterProvider([PeriodicExportingMetricReader(Exporter(), export_interval_millis=1e8)])

"""
LOGGER = "from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode\n"
# A value that the device is still busy with when the script goes on.
SLOW = """
import jax, jax.numpy as jnp
slow = jax.jit(lambda m: 1.5 + 0 * jax.lax.fori_loop(0, 200, lambda _, a: a @ a / 512, m)[0, 0])
matrix = jnp.ones((512, 512))
slow.lower(matrix).compile()
"""

Run = Callable[..., str]


def exports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


# Exit --------------------------------------------------------------------------------------------


def test_last_value_goes_out_at_exit(run_script: Run) -> None:
    """Nothing is closed, and the device is still busy: the provider exports once, with it."""
    script = f"""{PROVIDER}{LOGGER}{SLOW}
metrics.set_meter_provider(provider())
logger = MetricsLogger()
logger.log("", "loss", 0.5, Mode.TRAIN, 1)
logger.log("", "loss", slow(matrix), Mode.TRAIN, 2)
"""
    assert exports(run_script(script)) == [{"tunix.training.loss": 1.5, "tunix.training.step": 2}]


def test_last_value_goes_out_through_a_provider_that_was_set_late(run_script: Run) -> None:
    """Its shutdown was registered after ours, and would run first if ours did not move."""
    script = f"""{PROVIDER}{LOGGER}{SLOW}
logger = MetricsLogger()
logger.log("", "loss", 0.25, Mode.TRAIN, 0)
metrics.set_meter_provider(provider())
logger.log("", "loss", 0.5, Mode.TRAIN, 1)
logger.log("", "loss", slow(matrix), Mode.TRAIN, 2)
"""
    assert exports(run_script(script)) == [{"tunix.training.loss": 1.5, "tunix.training.step": 2}]


def test_last_value_of_a_forgotten_logger_goes_out(run_script: Run) -> None:
    """A stream with values that wait lives on without its logger."""
    script = f"""{PROVIDER}{LOGGER}{SLOW}
import gc
metrics.set_meter_provider(provider())
MetricsLogger().log("", "loss", slow(matrix), Mode.TRAIN, 2)
gc.collect()
"""
    assert exports(run_script(script)) == [{"tunix.training.loss": 1.5, "tunix.training.step": 2}]


def test_process_without_a_backend_emits_at_exit(run_script: Run) -> None:
    """It was alone to the end: its last values go out then, and no JAX is loaded for it."""
    script = f"""{PROVIDER}{LOGGER}
metrics.set_meter_provider(provider())
logger = MetricsLogger()
for step in range(3):
    logger.log("", "loss", float(step), Mode.TRAIN, step)
metrics.get_meter_provider().force_flush()
assert "jax" not in sys.modules
"""
    assert exports(run_script(script)) == [{"tunix.training.loss": 2.0, "tunix.training.step": 2}]


def test_close_in_a_process_without_a_backend_emits(run_script: Run) -> None:
    """Who closes the logger has said the last word about it."""
    script = f"""{PROVIDER}{LOGGER}
metrics.set_meter_provider(provider())
logger = MetricsLogger(MetricsLoggerOptions(emit_on_all_processes=True))
logger.log("", "loss", 1.0, Mode.TRAIN, 1)
logger.close()
metrics.get_meter_provider().shutdown()
"""
    assert exports(run_script(script)) == [{"tunix.training.loss": 1.0, "tunix.training.step": 1}]


# Backends ----------------------------------------------------------------------------------------


def test_logger_creates_no_backend(run_script: Run) -> None:
    """After every call of the logger, `jax.distributed.initialize` still works."""
    script = f"""{PROVIDER}{LOGGER}
import socket
import jax
from jax._src import xla_bridge
metrics.set_meter_provider(provider())
logger = MetricsLogger(MetricsLoggerOptions(emit_on_all_processes=True))
logger.log("", "loss", 1.0, Mode.TRAIN, 1)
logger.event("started")
with logger.span("prepare"):
    logger.get_metric("", "loss", Mode.TRAIN)
assert not xla_bridge.backends_are_initialized()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]
jax.distributed.initialize(address, num_processes=1, process_id=0)
logger.log("", "loss", 2.0, Mode.TRAIN, 2)
assert not xla_bridge.backends_are_initialized()
metrics.get_meter_provider().force_flush()
jax.devices()
logger.log("", "lr", 0.5, Mode.TRAIN, 3)
"""
    assert exports(run_script(script)) == [
        {"tunix.training.loss": 2.0, "tunix.lr": 0.5, "tunix.training.step": 3}
    ]


def _fake_bridge(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(**attributes))


def test_backend_being_created_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator that takes seconds, in another thread, with the lock held."""
    lock = threading.Lock()
    _fake_bridge(monkeypatch, _backend_lock=lock, backends_are_initialized=lambda: True)
    assert _process.process_index() == 0
    with lock:
        assert _process.process_index() is None


def test_index_is_unknown_where_jax_no_longer_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future JAX without the internal question: emission waits, nothing raises."""
    _fake_bridge(monkeypatch)
    assert _process.process_index() is None


def test_member_of_a_job_without_a_backend_never_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It joined a distributed job: it may be any of its processes, and stays silent."""
    jax = sys.modules["jax"]
    _fake_bridge(monkeypatch)
    assert _process.last_process_index() == 0
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert _process.last_process_index() is None


# Forks -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_forked_child_keeps_and_does_not_emit(run_script: Run) -> None:
    """No hang on the parent's locks or values on the device, nothing exported twice."""
    script = f"""{PROVIDER}{LOGGER}{SLOW}
import os, threading, time, warnings
warnings.simplefilter("ignore")
metrics.set_meter_provider(provider())
logger = MetricsLogger()
logger.log("", "lr", 0.5, Mode.TRAIN, 1)
logger.log("", "loss", slow(matrix), Mode.TRAIN, 2)
held, go = threading.Event(), threading.Event()
def hold():
    with logger._stream.lock:
        held.set()
        go.wait(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    logger.log("", "lr", 0.25, Mode.TRAIN, 3)
    logger.event("child")
    with logger.span("child") as span:
        assert not span.is_recording()
    assert logger.get_metric_history("", "lr", Mode.TRAIN).tolist() == [0.5, 0.25]
    assert not logger.metric_exists("", "loss", Mode.TRAIN)
    logger.close()
    os._exit(7)
go.set()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert logger.get_metric("", "loss", Mode.TRAIN) == 1.5
"""
    assert exports(run_script(script)) == [
        {"tunix.lr": 0.5, "tunix.training.loss": 1.5, "tunix.training.step": 2}
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_logger_made_in_a_forked_child_emits(run_script: Run) -> None:
    """Only what existed at the fork has the parent's identity."""
    script = f"""{PROVIDER}{LOGGER}
import os
pid = os.fork()
if pid == 0:
    import jax
    jax.devices()
    metrics.set_meter_provider(provider())
    MetricsLogger().log("", "loss", 1.0, Mode.TRAIN, 1)
    metrics.get_meter_provider().shutdown()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    assert exports(run_script(script)) == [{"tunix.training.loss": 1.0, "tunix.training.step": 1}]


def test_spawned_child_gets_the_options_and_creates_no_backend(run_script: Run) -> None:
    """Options pickle; the child's logger works, and emits to the child's providers alone."""
    script = f"""{PROVIDER}{LOGGER}
import multiprocessing

def work(options):
    logger = MetricsLogger(options)
    logger.log("", "loss", 0.5, Mode.TRAIN, 1)
    bridge = sys.modules.get("jax._src.xla_bridge")
    backend = bridge is not None and bridge.backends_are_initialized()
    return options, float(logger.get_metric("", "loss", Mode.TRAIN)), backend

if __name__ == "__main__":
    options = MetricsLoggerOptions("/logs", enabled="yes", attributes={{"team": "a"}})
    metrics.set_meter_provider(provider())
    MetricsLogger(options).log("", "lr", 0.25, Mode.TRAIN, 2)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(work, (options,)) == (options, 0.5, False)
"""
    assert exports(run_script(script)) == [{"tunix.lr": 0.25, "tunix.training.step": 2}]


# SDK ---------------------------------------------------------------------------------------------


def test_history_works_without_an_sdk(run_script: Run) -> None:
    """Only the API is required; spans and events cost nothing and raise nothing."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(tunix.__file__).parents[1])!r})
sys.modules["opentelemetry.sdk"] = None
{LOGGER}
import jax, jax.numpy as jnp
logger = MetricsLogger()
logger.log("", "loss", 1.0, Mode.TRAIN, 1)
logger.log("", "loss", jnp.float32(2), Mode.TRAIN, 2)
with logger.span("work") as span:
    assert not span.is_recording()
logger.event("done", severity=20)
print(logger.get_metric("", "loss", Mode.TRAIN))
logger.close()
"""
    assert run_script(script) == "1.5\n"


def test_disabled_sdk_gets_nothing(run_script: Run) -> None:
    """`OTEL_SDK_DISABLED=true` makes the SDK hand out instruments that drop everything."""
    script = f"""
import os
os.environ["OTEL_SDK_DISABLED"] = "true"
{PROVIDER}{LOGGER}
import logging, jax
logging.disable(logging.WARNING)  # the oldest SDK says so at each meter
jax.devices()
metrics.set_meter_provider(provider())
logger = MetricsLogger()
logger.log("", "loss", 1.0, Mode.TRAIN, 1)
metrics.get_meter_provider().force_flush()
assert logger.get_metric("", "loss", Mode.TRAIN) == 1.0
"""
    assert exports(run_script(script)) in ([], [{}])
