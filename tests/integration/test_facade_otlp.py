# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""`MetricsLogger` of tunix-core in processes of its own: what arrives over real OTLP."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from receivers import otlp_environment

from otlp_data import LogRecord
from otlp_receiver import HttpReceiver, Receiver

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

_SPEC = importlib.util.find_spec("tunix")
if _SPEC is None or not Path(str(_SPEC.origin)).with_name("sft").joinpath("_gauges.py").exists():
    pytest.skip("tests of tunix-core, which is not installed here", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]

# instrumentation-logging brings the handler that exports from 0.61b0 on. Before, it only put the
# trace id on each record, and the handler was the SDK's.
BRINGS_HANDLER = any(
    file.name == "handler.py"
    for file in importlib.metadata.files("opentelemetry-instrumentation-logging") or ()
)
LOGS_EXPORTED = (
    {} if BRINGS_HANDLER else {"OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED": "true"}
)

NEVER = {"OTEL_METRIC_EXPORT_INTERVAL": "3600000"}  # only a flush or the exit exports

# A meter provider as an application makes it; the exporter reads its endpoint from the environment.
PROVIDER = """
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
"""


# Values ------------------------------------------------------------------------------------------

TABLE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import jax
from opentelemetry import metrics
from tunix.sft.metrics_logger import MetricsLogger
from value_cases import VALUE_CASES

jax.devices()
logger = MetricsLogger()
for index, case in enumerate(VALUE_CASES):
    logger.log("", f"case {{index}}", case.make(), "train", index)
    logger.log("", "good", index, "train", index)
    if logger.metric_exists("", f"case {{index}}", "train"):  # it waits for a value being computed
        logger.get_metric_history("", f"case {{index}}", "train")
    assert metrics.get_meter_provider().force_flush()
"""


def test_no_value_costs_the_batch_it_is_exported_in(
    receiver: Receiver, otlp_env: Mapping[str, str], run_script: RunScript
) -> None:
    """Each value of the table, exported beside a good metric: both arrive as the table says."""
    from value_cases import VALUE_CASES

    env = {**otlp_env, **NEVER, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    result = run_script(TABLE, instrument=True, env=env, timeout=90).check()
    # Where a handler exports Python's logs, warnings are among them and nothing is printed.
    warnings = "\n".join([result.stderr, *(str(record.body) for record in receiver.logs)])
    assert "Traceback" not in warnings
    points = [point for point in receiver.metric_points if point.scope.name == "tunix"]
    good = {point.value for point in points if point.name == "tunix.good"}
    assert good == set(range(len(VALUE_CASES)))
    seen: dict[tuple[str, str], set[Any]] = {}
    for point in points:
        if key := point.attributes.get("tunix.metrics.name"):
            seen.setdefault((point.name, key), set()).add(point.value)
    for index, case in enumerate(VALUE_CASES):
        emitted = seen.get((f"tunix.case.{index}", f"case {index}"), set())
        assert emitted == (set() if case.emitted is None else {case.emitted}), case.name
        counted = seen.get(("tunix.training.nonfinite", f"case {index}"), set())
        assert counted == ({1} if case.counted else set()), case.name
        # One warning a key, and none for what is a number.
        assert warnings.count(f"'case {index}' is not emitted") == case.warned, case.name


# Events and spans --------------------------------------------------------------------------------

RECORD_FIELDS = sorted({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
OWN_KEYS = ("event.name", "otel.event.name", "getMessage", "__class__")
OTHER_KEYS = ("a.b.c", "奖励", "größe", "with space", "otelTraceID", "self", "x" * 300)

EVENTS = f"""
import logging
import jax
from opentelemetry import trace
from tunix.sft.metrics_logger import MetricsLogger

logging.getLogger("tunix.events").setLevel(logging.INFO)
jax.devices()
logger = MetricsLogger()
logger.event("outside")
with logger.span("data.load", {{"shard": 3, "ratio": 2.5}}):
    logger.event("inside", "fetched", {{"rows": 7, "ratio": 2.5, "hot": True}}, logging.WARNING)
    with logger.span("inner"):
        logger.event("deep")
    for key in {[*RECORD_FIELDS, *OWN_KEYS, *OTHER_KEYS]!r}:
        logger.event("key", attributes={{key: "given"}})
try:
    with logger.span("fails"):
        raise KeyError("missing")
except KeyError:
    pass
logger.event("map", {{"a": 1, "b": [1, 2.5, None]}})
logger.event("huge", 2**70, {{"n": 2**70}})
logger.event("not finite", attributes={{"nan": float("nan"), "inf": float("inf")}})
logger.event("debug", severity=logging.DEBUG)
logger.event("last")
"""


def event_name(record: LogRecord) -> str:
    """The event's name: handlers before 0.61b0 leave it among the attributes."""
    return record.event_name or record.attributes.get("event.name", "")


def test_events_and_spans_arrive_correlated(
    receiver: Receiver, otlp_env: Mapping[str, str], run_script: RunScript
) -> None:
    """An event inside a span has its trace and span id; every attribute keeps type and value."""
    env = {**otlp_env, **LOGS_EXPORTED}
    run_script(EVENTS, instrument=True, env=env, timeout=60).check()
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"data.load", "inner", "fails"}
    load, inner = spans["data.load"], spans["inner"]
    assert load.attributes == {"shard": 3, "ratio": 2.5}
    assert (inner.parent_id, inner.trace_id) == (load.span_id, load.trace_id)
    assert load.scope.name == "tunix"
    assert load.scope.version == importlib.metadata.version("tunix-core")
    assert (spans["fails"].status, [e.name for e in spans["fails"].events]) == (
        "ERROR",
        ["exception"],
    )

    ours = [record for record in receiver.logs if event_name(record)]
    named = {event_name(record): record for record in ours}
    assert (named["inside"].trace_id, named["inside"].span_id) == (load.trace_id, load.span_id)
    assert (named["deep"].trace_id, named["deep"].span_id) == (load.trace_id, inner.span_id)
    for name in ("outside", "last"):  # 1.25 writes sixteen zero bytes for none
        assert not (named[name].trace_id or "").strip("0")
    assert (named["inside"].severity_text, named["inside"].body) == ("WARN", "fetched")
    assert named["outside"].body == "outside"
    given = named["inside"].attributes
    assert (given["rows"], given["ratio"], given["hot"]) == (7, 2.5, True)
    assert "debug" not in named
    assert math.isnan(named["not finite"].attributes["nan"])
    assert named["not finite"].attributes["inf"] == math.inf
    assert named["huge"].body == named["huge"].attributes["n"] == str(2**70)
    # The handler of instrumentation-logging writes a body as text; the SDK's of old kept the map.
    assert ("2.5" in named["map"].body) if BRINGS_HANDLER else named["map"].body["a"] == 1


def test_every_attribute_key_works(http_receiver: HttpReceiver, run_script: RunScript) -> None:
    """Fields of a log record get a trailing underscore, all others arrive as they are."""
    env = {**otlp_environment(http_receiver), **LOGS_EXPORTED}
    run_script(EVENTS, instrument=True, env=env, timeout=60).check()
    arrived = [
        {key for key, value in record.attributes.items() if value == "given"}
        for record in http_receiver.logs
        if event_name(record) == "key"
    ]
    # An earlier instrumentation-logging sets `otelTraceID` on each record itself.
    free = [key for key in OTHER_KEYS if key != "otelTraceID"]
    renamed = [{f"{key}_"} for key in [*RECORD_FIELDS, *OWN_KEYS]]
    missing = [keys for keys in [*renamed, *({key} for key in free)] if keys not in arrived]
    assert not missing
    assert {"otelTraceID"} in arrived or {"otelTraceID_"} in arrived
    assert len(arrived) == len(RECORD_FIELDS) + len(OWN_KEYS) + len(OTHER_KEYS)


def test_keys_that_a_record_factory_took_after_the_import(run_script: RunScript) -> None:
    """Instrumenting `logging` after tunix is imported takes further keys; no event is lost."""
    script = """
    import logging
    import jax
    from tunix.sft.metrics_logger import MetricsLogger
    from opentelemetry.instrumentation.logging import LoggingInstrumentor

    LoggingInstrumentor().instrument(inject_trace_context=True)

    class Collect(logging.Handler):
        def emit(self, record):
            print(record.getMessage(), record.__dict__.get("otelTraceID_"))

    events = logging.getLogger("tunix.events")
    events.setLevel(logging.INFO)
    events.addHandler(Collect())
    jax.devices()
    MetricsLogger().event("e", "arrived", {"otelTraceID": "given"})
    """
    assert run_script(script, timeout=60).check().stdout == "arrived given\n"


# Lifetime ----------------------------------------------------------------------------------------

LOGGING = """
import jax
import jax.numpy as jnp
from tunix.sft.metrics_logger import MetricsLogger

logger = MetricsLogger()
"""
ON_DEVICE = """
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, y: jnp.tanh(y @ y), x)[0, 0] * 0 + 0.5)
work = jnp.ones((700, 700))
logger.log("", "loss", slow(work), "train", 9)
"""


@pytest.mark.parametrize(
    ("order", "value"),
    [
        (LOGGING + "logger.log('', 'loss', 0.9, 'train', 8)\n" + PROVIDER, "0.5"),
        (LOGGING + "jax.devices()\n" + PROVIDER, "0.5"),
        (PROVIDER + LOGGING, "0.5"),
        (LOGGING + PROVIDER, ON_DEVICE),
    ],
    ids=["no backend", "logger first", "provider first", "pending on the device"],
)
def test_last_value_goes_out_at_exit(
    http_receiver: HttpReceiver, run_script: RunScript, order: str, value: str
) -> None:
    """No flush, no close: the exit exports value and step, once, and nothing is on stderr."""
    last = value if value == ON_DEVICE else f"logger.log('', 'loss', {value}, 'train', 9)"
    env = {**otlp_environment(http_receiver), **NEVER}
    result = run_script(order + last, env=env, timeout=60).check()
    assert (result.stdout, result.stderr) == ("", "")
    points = [(p.name, p.value, p.attributes) for p in http_receiver.metric_points]
    mode = {"tunix.training.mode": "train"}
    assert sorted(points, key=str) == [
        ("tunix.training.loss", 0.5, mode),
        ("tunix.training.step", 9, mode),
    ]


EVERYTHING = """
import logging
logging.getLogger("tunix.events").setLevel(logging.INFO)
with logger.span("s", {"a": 1}):
    logger.event("e", "body", {"name": "n"})
    for step, loss in enumerate([2.0, float("nan"), jnp.float32(1.0)], 1):
        logger.log("actor", "loss", loss, "train", step)
print(len(logger.get_metric_history("actor", "loss", "train")))
logger.log("actor", "loss", jax.jit(lambda: jnp.float32(0.5))(), "train", 4)
logger.close()
logger.log("actor", "loss", 1.0, "train", 5)
print(logger.get_metric("actor", "loss", "train"))
"""


@pytest.mark.parametrize("absent", ["provider", "package"])
def test_process_without_an_sdk_works_and_prints_nothing(
    run_script: RunScript, absent: str
) -> None:
    """Neither a provider nor even the package of the SDK is needed."""
    hide = "import sys; sys.modules['opentelemetry.sdk'] = None\n" if absent == "package" else ""
    result = run_script(hide + LOGGING + EVERYTHING, timeout=60).check()
    assert (result.stdout, result.stderr) == ("3\nnan\n", "")


def test_disabled_sdk_exports_nothing(http_receiver: HttpReceiver, run_script: RunScript) -> None:
    """`OTEL_SDK_DISABLED=true` ends all export; the history works."""
    env = {**otlp_environment(http_receiver), **LOGS_EXPORTED, "OTEL_SDK_DISABLED": "true"}
    script = LOGGING + EVERYTHING
    result = run_script(script, instrument=True, env=env, timeout=60).check()
    assert result.stdout == "3\nnan\n"
    assert "tunix" not in result.stderr
    assert not [r for r in http_receiver.requests if r.signal != "logs"]
