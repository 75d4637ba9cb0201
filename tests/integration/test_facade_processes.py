# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""`MetricsLogger` of tunix-core in distributed jobs and in forked and spawned children."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from receivers import otlp_environment, run_script

from otlp_data import MetricPoint
from otlp_receiver import HttpReceiver

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

_SPEC = importlib.util.find_spec("tunix")
if _SPEC is None or not Path(str(_SPEC.origin)).with_name("sft").joinpath("_gauges.py").exists():
    pytest.skip("tests of tunix-core, which is not installed here", allow_module_level=True)

STEPS = 5
TIMEOUT = 60.0  # what hangs is killed then, with its whole process group

PROVIDERS = """
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
"""

# Each rank trains on its half of a batch; the loss is replicated by a collective in every step.
JOB = (
    PROVIDERS
    + """
import collections, json, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

address, rank, everywhere, steps = sys.argv[1], *map(int, sys.argv[2:])
rank_options = MetricsLoggerOptions(emit_on_all_processes=everywhere)
logger = MetricsLogger(rank_options)
logger.log("", "early", 10.0 + rank, "train", 0)
with logger.span("early", {"rank": rank}):
    pass
assert logger.get_metric("", "early", "train") == 10.0 + rank

jax.distributed.initialize(address, num_processes=2, process_id=rank)
compilations = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **names: compilations.update([str(names.get("fun_name", event))])
    if event.endswith("backend_compile_duration") else None
)
mesh = Mesh(np.array(jax.devices()), ("data",))
sharded = NamedSharding(mesh, PartitionSpec("data"))
replicated = NamedSharding(mesh, PartitionSpec())
mean = jax.jit(jnp.mean, out_shardings=replicated)
double = jax.jit(lambda x: x * 2, out_shardings=sharded)
elsewhere = jax.sharding.SingleDeviceSharding(jax.devices()[1])  # of process 1
for step in range(1, steps + 1):
    local = np.full(4, float(step * (1 + 2 * rank)), np.float32)
    batch = jax.make_array_from_process_local_data(sharded, local)
    logger.log("", "loss", mean(batch), "train", step)
    logger.log("", "spread", double(batch), "train", step)
    parts = [jax.device_put(np.float32(7), jax.devices()[1])] if rank else []
    there = jax.make_array_from_single_device_arrays((), elsewhere, parts, dtype=jnp.float32)
    logger.log("", "elsewhere", there, "train", step)
with logger.span("late", {"rank": rank}):
    pass
logger.close()
multihost_utils.sync_global_devices("end")
print(json.dumps({
    "loss": logger.get_metric_history("", "loss", "train").tolist(),
    "spread": len(logger.get_metric_history("", "spread", "train")),
    "compilations": dict(compilations),
}))
"""
)


@pytest.fixture(scope="module", params=[False, True], ids=["process 0", "all processes"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run of two processes: the policy, what both printed, and what arrived."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with HttpReceiver() as receiver, ThreadPoolExecutor(2) as pool:

        def run(rank: int) -> dict[str, Any]:
            env = otlp_environment(receiver) | {"OTEL_RESOURCE_ATTRIBUTES": f"rank={rank}"}
            result = run_script(
                JOB,
                env=env | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                arguments=[address, str(rank), str(int(request.param)), str(STEPS)],
                timeout=TIMEOUT,
                cwd=tmp_path_factory.mktemp(f"rank{rank}"),
            ).check()
            last_line = result.stdout.splitlines()[-1]  # Gloo prints lines of its own
            return {**json.loads(last_line), "stderr": result.stderr}

        printed = list(pool.map(run, range(2)))
        yield request.param, printed, receiver


def last_values(points: list[MetricPoint]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last value of each metric on each rank, by (rank, process index)."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for point in points:
        sender = (point.resource["rank"], str(point.attributes.get("tunix.jax.process.index")))
        last.setdefault(sender, {})[point.name] = point.value
    return last


def test_which_processes_emit(job: Any) -> None:
    """Process 0 alone; with `emit_on_all_processes` both, each with its index."""
    everywhere, _, receiver = job
    senders = {("0", "0"), ("1", "1")} if everywhere else {("0", "None")}
    assert set(last_values(receiver.metric_points)) == senders
    spans = Counter((span.name, span.resource["rank"]) for span in receiver.spans)
    assert spans == Counter((name, rank) for name in ("early", "late") for rank, _ in senders)
    for span in receiver.spans:
        if everywhere and span.name == "late":
            assert str(span.attributes["tunix.jax.process.index"]) == span.resource["rank"]


def test_replicated_loss_is_right_on_every_process(job: Any) -> None:
    """The mean over both halves of the batch, in history and gauge, at the last step."""
    _, printed, receiver = job
    losses = [2.0 * step for step in range(1, STEPS + 1)]
    assert [p["loss"] for p in printed] == [losses, losses]
    for values in last_values(receiver.metric_points).values():
        assert values["tunix.training.loss"] == losses[-1]
        assert values["tunix.training.step"] == STEPS


def test_value_of_several_processes_is_never_exported_in_part(job: Any) -> None:
    """A sharded array has no gauge; a value of process 1 has one on process 1 only."""
    everywhere, printed, receiver = job
    assert [p["spread"] for p in printed] == [STEPS, STEPS]
    assert [p["stderr"].count("'spread' is not emitted") for p in printed] == [1, 1]
    points = receiver.metric_points
    assert not [point for point in points if point.name == "tunix.spread"]
    of_process_1 = {p.resource["rank"]: p.value for p in points if p.name == "tunix.elsewhere"}
    assert of_process_1 == ({"1": 7.0} if everywhere else {})


def test_what_was_logged_before_initialize_arrives(job: Any) -> None:
    """The logger waits with emitting until it knows which process it is in."""
    _, _, receiver = job
    for (rank, _), values in last_values(receiver.metric_points).items():
        assert values["tunix.early"] == 10.0 + int(rank)


def test_emitting_adds_no_device_work(job: Any) -> None:
    """Both ranks compile the same functions, also when one of them emits and the other does not."""
    _, (first, second), _ = job
    assert first["compilations"] == second["compilations"]
    assert first["compilations"]["jit(mean)"] == 1


# Children ----------------------------------------------------------------------------------------

CHILDREN = (
    PROVIDERS
    + """
import multiprocessing, sys, warnings
from tunix.sft.metrics_logger import MetricsLogger

logger = MetricsLogger()


def work(spawned):
    mine = MetricsLogger() if spawned else logger
    with mine.span("child"):
        mine.log("", "loss", 9.0, "train", 99)
        mine.log("", "child", 1.0, "train", 99)
    assert mine.get_metric("", "child", "train") == 1.0
    mine.close()
    assert not spawned or "jax" not in sys.modules


if __name__ == "__main__":
    import jax
    import jax.numpy as jnp

    warnings.simplefilter("ignore")  # forking with threads is what is tried here
    jax.devices()
    pending = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda i, y: jnp.tanh(y @ y), x)[0, 0])
    with logger.span("parent"):
        logger.log("", "loss", 2.0, "train", 1)
        logger.log("", "slow", pending(jnp.zeros((600, 600))), "train", 1)
    method = sys.argv[1]
    # A forked child ends without running exit hooks; with them JAX itself aborts there.
    child = multiprocessing.get_context(method).Process(target=work, args=(method == "spawn",))
    child.start()
    child.join()
    logger.log("", "loss", 0.5, "train", 2)
    print(child.exitcode)
"""
)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes(http_receiver: HttpReceiver, run_script: RunScript, method: str) -> None:
    """A child ends, and what the parent logged arrives once.

    A forked child is the parent for its receivers and stays silent. A spawned one that makes its
    own providers and logger is a process like any other.
    """
    env = {**otlp_environment(http_receiver), "OTEL_METRIC_EXPORT_INTERVAL": "3600000"}
    env |= {"JAX_PLATFORMS": "cpu"}
    result = run_script(CHILDREN, env=env, arguments=[method], timeout=TIMEOUT).check()
    assert (result.stdout, result.stderr) == ("0\n", "")
    children = 0 if method == "fork" else 1
    assert Counter(span.name for span in http_receiver.spans) == Counter(
        {"parent": 1, "child": children}
    )
    values = Counter((point.name, point.value) for point in http_receiver.metric_points)
    assert values == Counter(
        {
            ("tunix.training.loss", 0.5): 1,
            ("tunix.slow", 0.0): 1,
            ("tunix.training.step", 2): 1,
            ("tunix.training.loss", 9.0): children,
            ("tunix.child", 1.0): children,
            ("tunix.training.step", 99): children,
        }
    )
