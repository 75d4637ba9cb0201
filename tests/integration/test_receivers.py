# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The receivers against the exporters of the real SDK, and against clients that misbehave."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import inspect
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from grpc import Compression as GrpcCompression
from opentelemetry import _logs as logs_api
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from receivers import GrpcReceiver, run_script

from otlp_receiver import HttpReceiver, Receiver

if "event_name" not in inspect.signature(logs_api.Logger.emit).parameters:
    pytest.skip("speaks a logs API that this OpenTelemetry does not have", allow_module_level=True)

RESOURCE = Resource({"service.name": "sut", "host.cores": 2})


def exporter(receiver: Receiver, signal: str, **options: Any) -> Any:
    """The SDK's exporter of `signal` for the protocol of `receiver`."""
    module, name = {
        "traces": ("trace_exporter", "OTLPSpanExporter"),
        "metrics": ("metric_exporter", "OTLPMetricExporter"),
        "logs": ("_log_exporter", "OTLPLogExporter"),
    }[signal]
    if receiver.protocol == "grpc":
        kind, endpoint, options = "grpc", receiver.endpoint, {"insecure": True, **options}
    else:
        kind, endpoint = "http", f"{receiver.endpoint}/v1/{signal}"
    module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.{module}")
    return getattr(module, name)(endpoint=endpoint, **options)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextlib.contextmanager
def tracing(receiver: Receiver, **options: Any) -> Iterator[Any]:
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter(receiver, "traces", **options)))
    yield provider.get_tracer("scope", "1.2", schema_url="https://schema")
    provider.shutdown()


@contextlib.contextmanager
def metering(receiver: Receiver) -> Iterator[Any]:
    reader = PeriodicExportingMetricReader(exporter(receiver, "metrics"), 60_000)
    provider = MeterProvider([reader], resource=RESOURCE, shutdown_on_exit=False)
    yield provider.get_meter("scope", "1.2")
    provider.shutdown()


def test_span_arrives_with_ids_parent_kind_and_status(receiver: Receiver) -> None:
    with tracing(receiver) as tracer, tracer.start_as_current_span("parent") as parent:
        link = Link(parent.get_span_context(), {"why": "run"})
        with tracer.start_as_current_span("child", kind=SpanKind.CLIENT, links=[link]) as span:
            span.add_event("checkpoint", {"step": 3}, timestamp=17)
            span.set_status(Status(StatusCode.ERROR, "boom"))
    child, root = receiver.spans
    assert (child.name, root.name) == ("child", "parent")
    assert root.parent_id is None
    assert child.parent_id == root.span_id == f"{parent.get_span_context().span_id:016x}"
    assert child.trace_id == root.trace_id == f"{parent.get_span_context().trace_id:032x}"
    assert (child.kind, root.kind) == ("CLIENT", "INTERNAL")
    assert (child.status, child.status_description) == ("ERROR", "boom")
    assert (root.status, root.status_description) == ("UNSET", "")
    assert [(e.name, e.time_ns, e.attributes) for e in child.events] == [
        ("checkpoint", 17, {"step": 3})
    ]
    assert [(k.span_id, k.trace_id, k.attributes) for k in child.links] == [
        (root.span_id, root.trace_id, {"why": "run"})
    ]
    assert root.seconds >= child.seconds > 0
    assert root.start_ns <= child.start_ns <= child.end_ns <= root.end_ns
    scope = child.scope
    assert (scope.name, scope.version, scope.schema_url) == ("scope", "1.2", "https://schema")
    assert child.resource == {"service.name": "sut", "host.cores": 2}


def test_attribute_types_survive(receiver: Receiver) -> None:
    sent = {"s": "1", "b": True, "i": 1, "f": 1.0, "l": [1, 2], "t": ["a"]}
    with tracing(receiver) as tracer, tracer.start_as_current_span("typed") as span:
        span.set_attributes(sent)
    (typed,) = receiver.spans
    assert typed.attributes == sent
    assert {key: type(value) for key, value in typed.attributes.items()} == {
        key: type(value) for key, value in sent.items()
    }


def test_gauges_and_sums_keep_number_type_and_temporality(receiver: Receiver) -> None:
    with metering(receiver) as meter:
        meter.create_gauge("loss", unit="1", description="d").set(0.5, {"mode": "train"})
        meter.create_gauge("step").set(7)
        meter.create_counter("updates", unit="{update}").add(3)
        meter.create_up_down_counter("queue").add(-2)
    points = {point.name: point for point in receiver.metric_points}
    assert {name: (p.kind, p.value, type(p.value)) for name, p in points.items()} == {
        "loss": ("gauge", 0.5, float),
        "step": ("gauge", 7, int),
        "updates": ("sum", 3, int),
        "queue": ("sum", -2, int),
    }
    loss = points["loss"]
    assert (loss.unit, loss.description, loss.attributes) == ("1", "d", {"mode": "train"})
    assert (loss.temporality, loss.monotonic, loss.count) == (None, None, None)
    assert loss.resource["host.cores"] == 2
    assert loss.scope.name == "scope"
    updates = points["updates"]
    assert (updates.temporality, updates.monotonic) == ("CUMULATIVE", True)
    assert 0 < updates.start_ns <= updates.time_ns
    assert points["queue"].monotonic is False


def test_histogram_keeps_count_sum_and_buckets(receiver: Receiver) -> None:
    with metering(receiver) as meter:
        histogram = meter.create_histogram(
            "duration", unit="s", explicit_bucket_boundaries_advisory=[1.0, 5.0]
        )
        for value in (0.5, 2.5, 9.0):
            histogram.record(value)
    (point,) = receiver.metric_points
    assert (point.kind, point.value, point.unit) == ("histogram", None, "s")
    assert (point.count, point.sum, point.min, point.max) == (3, 12.0, 0.5, 9.0)
    assert (point.bounds, point.bucket_counts) == ((1.0, 5.0), (1, 1, 1))


def test_log_keeps_map_body_and_event_name(receiver: Receiver) -> None:
    body = {"loss": 0.5, "step": 3, "nested": {"ok": True}, "list": [1, "a", b"\0"]}
    provider = LoggerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter(receiver, "logs")))
    logger = provider.get_logger("events", "3")
    with tracing(receiver) as tracer, tracer.start_as_current_span("around"):
        logger.emit(
            timestamp=5,
            severity_number=SeverityNumber.WARN,
            severity_text="WARN",
            body=body,
            attributes={"mode": "train", "n": 1},
            event_name="tunix.step",
        )
    logger.emit(body="plain")
    provider.shutdown()
    event, plain = receiver.logs
    (span,) = receiver.spans
    assert (event.event_name, event.body) == ("tunix.step", body)
    assert type(event.body["step"]) is int
    assert (event.severity_number, event.severity_text, event.time_ns) == (13, "WARN", 5)
    assert event.observed_ns > 5
    assert event.attributes == {"mode": "train", "n": 1}
    assert (event.trace_id, event.span_id) == (span.trace_id, span.span_id)
    assert (event.scope.name, event.resource["service.name"]) == ("events", "sut")
    assert (plain.event_name, plain.body, plain.trace_id) == ("", "plain", None)


def test_gzip_is_accepted(receiver: Receiver) -> None:
    options = {"grpc": GrpcCompression.Gzip, "http/protobuf": HttpCompression.Gzip}
    with tracing(receiver, compression=options[receiver.protocol]) as tracer:
        tracer.start_span("zipped").end()
    assert [span.name for span in receiver.spans] == ["zipped"]
    if receiver.protocol != "grpc":  # gRPC takes its encoding header off
        assert receiver.requests[0].headers["content-encoding"] == "gzip"


def test_request_headers_are_kept(receiver: Receiver) -> None:
    with tracing(receiver, headers={"x-token": "abc"}) as tracer:
        tracer.start_span("one").end()
    (request,) = receiver.requests
    assert request.signal == "traces"
    assert request.headers["x-token"] == "abc"


def test_wait_for_returns_when_another_thread_delivers(receiver: Receiver) -> None:
    def deliver() -> None:
        with tracing(receiver) as tracer:
            tracer.start_span("late").end()

    thread = threading.Timer(0.1, deliver)
    thread.start()
    receiver.wait_for(lambda store: store.spans, timeout=10)
    thread.join()
    receiver.clear()
    assert receiver.spans == receiver.requests == []


def test_wait_for_names_what_arrived_when_time_is_up(receiver: Receiver) -> None:
    with tracing(receiver) as tracer:
        tracer.start_span("only.this").end()
    with pytest.raises(TimeoutError, match=r"0\.05 s.*1 spans \['only\.this'\]"):
        receiver.wait_for(lambda store: len(store.spans) > 1, timeout=0.05)


def test_many_clients_at_once_lose_nothing(receiver: Receiver) -> None:
    def client(number: int) -> None:
        with tracing(receiver) as tracer:
            for _ in range(20):
                tracer.start_span(f"client.{number}").end()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {f"client.{n}": 20 for n in range(8)}
    names = [span.name for span in receiver.spans]
    assert {name: names.count(name) for name in names} == counts


@pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])
def test_only_loopback_is_served(kind: type[HttpReceiver | GrpcReceiver]) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "localhost", "example.com", ""):
        with pytest.raises(ValueError, match=r"loopback address such as 127\.0\.0\.1, got"):
            kind(host)


@pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])
def test_stop_frees_port_and_threads_while_a_client_stays_connected(
    kind: type[HttpReceiver | GrpcReceiver],
) -> None:
    before = set(threading.enumerate())
    with kind() as receiver, tracing(receiver) as tracer:
        host, port = receiver.endpoint.removeprefix("http://").split(":")
        tracer.start_span("before").end()
        with socket.create_connection((host, int(port))):
            start = time.monotonic()
            receiver.stop()
            assert time.monotonic() - start < 3
    assert [span.name for span in receiver.spans] == ["before"]
    # The listening socket is gone ...
    with pytest.raises(ConnectionError):
        socket.create_connection((host, int(port)), timeout=1)
    # ... and so are the threads that served; what is left belongs to the exporter.
    left = {t.name for t in set(threading.enumerate()) - before}
    assert not [name for name in left if "receiver" in name or "process_request" in name]


def post(receiver: HttpReceiver, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/x-protobuf"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection = http.client.HTTPConnection(receiver.endpoint.removeprefix("http://"), timeout=5)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_empty_request_is_answered_with_an_empty_response(http_receiver: HttpReceiver) -> None:
    assert post(http_receiver, "/v1/traces", b"") == (200, b"")
    assert [request.signal for request in http_receiver.requests] == ["traces"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/profiles", b"", {}, 404),
        ("/", b"", {}, 404),
        ("/v1/traces", b"\xff\xff\xff", {}, 400),
        ("/v1/logs", b"no gzip", {"Content_Encoding": "gzip"}, 400),
        ("/v1/logs", gzip.compress(b"x" * 99)[:-9], {"Content_Encoding": "gzip"}, 400),
        ("/v1/traces", b"", {"Content_Encoding": "br"}, 415),
        ("/v1/traces", b"{}", {"Content_Type": "application/json"}, 415),
        ("/v1/traces", b"", {"Content_Length": "nonsense"}, 411),
        ("/v1/traces", b"", {"Content_Length": str(2**40)}, 413),
    ],
)
def test_bad_request_is_refused_and_nothing_is_stored(
    http_receiver: HttpReceiver, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    answered, reason = post(http_receiver, path, body, **headers)
    assert answered == status
    assert reason
    assert http_receiver.requests == []


def test_decompressed_size_is_bounded(http_receiver: HttpReceiver) -> None:
    bomb = gzip.compress(bytes(65 * 2**20), 1)
    assert post(http_receiver, "/v1/traces", bomb, Content_Encoding="gzip")[0] == 413


def test_get_is_not_allowed(http_receiver: HttpReceiver) -> None:
    address = http_receiver.endpoint.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address, timeout=5)) as connection:
        connection.request("GET", "/v1/traces")
        assert connection.getresponse().status == 405


def test_client_that_hangs_up_disturbs_nobody(
    http_receiver: HttpReceiver, capfd: pytest.CaptureFixture[str]
) -> None:
    host, port = http_receiver.endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/traces HTTP/1.1\r\nContent-Length: 100\r\n\r\nshort")
    assert post(http_receiver, "/v1/traces", b"")[0] == 200
    assert capfd.readouterr().err == ""


SCRIPT = """
from opentelemetry import metrics, trace
from opentelemetry._logs import get_logger
with trace.get_tracer("script").start_as_current_span("work"):
    metrics.get_meter("script").create_gauge("level").set(3)
    get_logger("script").emit(body={"a": 1}, event_name="done")
print("printed")
"""


def test_instrumented_process_exports_all_signals(
    receiver: Receiver, otlp_env: dict[str, str], run_script: Any
) -> None:
    result = run_script(SCRIPT, instrument=True, env=otlp_env, timeout=60).check()
    assert result.stdout == "printed\n"
    assert [span.name for span in receiver.spans] == ["work"]
    assert receiver.spans[0].resource["service.name"] == "integration-test"
    assert {point.value for point in receiver.metric_points if point.name == "level"} == {3}
    assert ("done", {"a": 1}) in [(record.event_name, record.body) for record in receiver.logs]


def test_plain_process_exports_nothing(
    receiver: Receiver, otlp_env: dict[str, str], run_script: Any
) -> None:
    run_script(SCRIPT, instrument=False, env=otlp_env, timeout=60).check()
    assert receiver.requests == []


def test_hanging_script_is_killed_with_its_children_and_its_output_is_shown(
    tmp_path: Path,
) -> None:
    source = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        time.sleep(600)
    """
    with pytest.raises(AssertionError, match=r"still running after 2 s[^$]*child \d+") as caught:
        run_script(source, timeout=2, cwd=tmp_path)
    pid = str(caught.value).split("child ")[1].split()[0]
    for _ in range(50):  # an orphan is reaped a moment later
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
        if state.stdout.strip() in ("", "Z"):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {pid} still runs: {state.stdout}")
