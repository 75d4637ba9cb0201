# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What many steps leave: every number at the receiver, and no memory, thread or span behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from receivers import otlp_environment

from otlp_receiver import HttpReceiver

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

pytest.importorskip("opentelemetry.instrumentation.tunix", reason="tests of the instrumentor")

INSTRUMENTOR_TESTS = Path(__file__).parents[2] / "opentelemetry-instrumentation-tunix" / "tests"

# A step gauge that is read once a minute keeps one step of a thousand: events have to keep all.
ONE_READING = {
    "OTEL_METRIC_EXPORT_INTERVAL": "60000",
    # Per step one event; the SDK's queue of 2,048 is drained fast enough for them.
    "OTEL_BLRP_SCHEDULE_DELAY": "100",
}

THOUSAND_STEPS = f"""
import sys
sys.path.insert(0, {str(INSTRUMENTOR_TESTS)!r})
import linear_sft

trainer = linear_sft.trainer()
trainer.train(linear_sft.batches(1000))
trainer.close()
history = trainer.metrics_logger.get_metric_history("", "loss", "train")
import json
print(json.dumps([float(value) for value in history]))
"""

# Two threads write to each step, as an RL learner and its trainer do, in any order: in step with
# each other, and each as fast as it can.
INTERLEAVED = """
import random, threading, time
from tunix.sft import metrics_logger

logger = metrics_logger.MetricsLogger()

def write(prefix, number, wait):
    for step in range(1, 501):
        wait()
        time.sleep(random.random() * 0.001)
        logger.log(prefix, f"rewards/{number}", step * number, "train", step)

def two_threads(prefix, wait):
    threads = [threading.Thread(target=write, args=(prefix, i, wait)) for i in (1, 2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

two_threads("together", threading.Barrier(2).wait)
two_threads("apart", lambda: None)
for number in range(200):
    logger.log("wide", f"scalar/{number}", number + 0.5, "train", 7)
logger.close()
"""


def steps_of(receiver: HttpReceiver, prefix: str | None = None) -> list[Any]:
    return [
        log
        for log in receiver.logs
        if log.event_name == "tunix.training.step_completed"
        and log.attributes.get("tunix.metrics.prefix") == prefix
    ]


def test_a_thousand_steps_between_two_readings_all_arrive_in_order(
    http_receiver: HttpReceiver, run_script: RunScript
) -> None:
    """One event a step with the loss of the library's own history."""
    env = otlp_environment(http_receiver) | ONE_READING
    result = run_script(THOUSAND_STEPS, instrument=True, env=env, timeout=300).check()
    losses = json.loads(result.stdout.splitlines()[-1])
    assert len(losses) == 1000
    found = [log for log in steps_of(http_receiver) if "tunix.training.loss" in log.body]
    assert [log.attributes["tunix.training.step"] for log in found] == list(range(1, 1001))
    assert [log.body["tunix.training.loss"] for log in found] == losses
    assert not any(log.attributes.get("tunix.training.step.late") for log in found)


def test_steps_that_two_threads_write_arrive_whole_and_in_order(
    http_receiver: HttpReceiver, run_script: RunScript
) -> None:
    """And a step of two hundred scalars arrives as one event."""
    env = otlp_environment(http_receiver) | ONE_READING
    run_script(INTERLEAVED, instrument=True, env=env, timeout=300).check()
    whole = {step: {"tunix.rewards.1": step, "tunix.rewards.2": 2 * step} for step in range(1, 501)}
    found = steps_of(http_receiver, "together")
    assert [(log.attributes["tunix.training.step"], log.body) for log in found] == [*whole.items()]
    # A thread that runs ahead closes a step that the other has not reached: that one's value is in
    # a second event, which says so. Nothing is lost and nothing told twice.
    found = steps_of(http_receiver, "apart")
    first = [log for log in found if not log.attributes.get("tunix.training.step.late")]
    assert sorted(log.attributes["tunix.training.step"] for log in first) == list(whole)
    values = Counter(
        (log.attributes["tunix.training.step"], *item) for log in found for item in log.body.items()
    )
    assert values == Counter((step, *item) for step, body in whole.items() for item in body.items())
    (wide,) = steps_of(http_receiver, "wide")
    assert wide.body == {f"tunix.scalar.{number}": number + 0.5 for number in range(200)}


# Batch processors to exporters that discard; all steps on one trainer.
MANY_STEPS = f"""
import ctypes, gc, json, sys, threading
sys.path.insert(0, {str(INSTRUMENTOR_TESTS)!r})
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExportResult
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from tunix.sft import peft_trainer

class Discard:
    def __init__(self, result): self.result = result
    def export(self, *a, **k): return self.result
    def shutdown(self, *a, **k): pass
    def force_flush(self, *a, **k): return True

class DiscardMetrics(Discard, MetricExporter):
    def __init__(self):
        MetricExporter.__init__(self)
        self.result = MetricExportResult.SUCCESS

class Count(SpanProcessor):
    started = ended = 0
    def on_start(self, *a, **k): self.started += 1
    def on_end(self, *a): self.ended += 1

count = Count()
tracer_provider = TracerProvider()
tracer_provider.add_span_processor(count)
tracer_provider.add_span_processor(BatchSpanProcessor(Discard(SpanExportResult.SUCCESS)))
trace.set_tracer_provider(tracer_provider)
logger_provider = LoggerProvider()
logger_provider.add_log_record_processor(
    BatchLogRecordProcessor(Discard(LogRecordExportResult.SUCCESS))
)
_logs.set_logger_provider(logger_provider)
metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(DiscardMetrics(), 1000)]))

if sys.argv[2] == "instrumented":
    from opentelemetry.instrumentation.tunix import TunixInstrumentor
    TunixInstrumentor().instrument()

class Tiny(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))

config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=None)
trainer = peft_trainer.PeftTrainer(Tiny(), optax.sgd(1e-3), config)
trainer.with_loss_fn(lambda model, x: jnp.mean((model.weight[...] - x) ** 2))
batch = {{"x": np.ones(2)}}

def state():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 / 2**20, threading.active_count()

def data():
    for number in range(int(sys.argv[1])):
        if number == 1000:
            states.append(state())
        yield batch
    states.append(state())

states = []
trainer.train(data())
print(json.dumps({{"states": states, "started": count.started, "ended": count.ended}}))
"""


@pytest.mark.slow
def test_a_hundred_thousand_steps_leave_memory_and_threads_as_they_were_after_a_thousand(
    run_script: RunScript,
) -> None:
    """At most 5 MB beyond what the same run takes uninstrumented, whose logger keeps a history."""
    steps = 100_000

    def run(mode: str) -> dict[str, Any]:
        arguments = [str(steps), mode]
        result = run_script(MANY_STEPS, arguments=arguments, timeout=1500).check()
        return json.loads(result.stdout.splitlines()[-1])

    control, ours = run("control"), run("instrumented")
    growth = [end[0] - start[0] for start, end in (control["states"], ours["states"])]
    print(f"growth {growth[1]:.1f} MB instrumented, {growth[0]:.1f} MB not; {ours['states']}")
    assert growth[1] - growth[0] <= 5
    (_, threads_before), (_, threads_after) = ours["states"]
    assert threads_after == threads_before
    assert ours["started"] == ours["ended"] >= steps + 1
