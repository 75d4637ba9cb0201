# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""A small OTLP/HTTP receiver that keeps what arrives and hands it out as plain Python values.

It serves the demo and the integration tests: one process, one run, loopback only. It stores all
that it gets and forwards nothing; for anything longer use the OpenTelemetry Collector.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import ipaddress
import socket
import socketserver
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from otlp_data import LogRecord, MetricPoint, Signal, Span, decode

# Far above any batch of an SDK; it bounds what a broken client can make the receiver hold.
_MAX_BODY_BYTES: Final = 64 * 2**20

ENDPOINTS: Final[dict[str, tuple[Signal, type[Message], type[Message]]]] = {
    "/v1/traces": (
        "traces",
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
    ),
    "/v1/metrics": (
        "metrics",
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
    "/v1/logs": (
        "logs",
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
    ),
}
"""HTTP path → signal, request, response."""


@dataclass(frozen=True)
class Request:
    """One export request as it came in; header and metadata names are in lower case."""

    signal: Signal
    message: Message
    headers: Mapping[str, str]


class TelemetryStore:
    """Everything that arrived, in order of arrival. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.clear()

    def clear(self) -> None:
        """Forgets what has arrived so far."""
        with self._changed:
            self._requests: list[Request] = []
            self._items: dict[Signal, list[Any]] = {"traces": [], "metrics": [], "logs": []}

    def add(self, signal: Signal, message: Message, headers: Mapping[str, str]) -> None:
        """Decodes and keeps one `Export*ServiceRequest`."""
        items = decode(signal, message)
        with self._changed:
            self._requests.append(Request(signal, message, headers))
            self._items[signal].extend(items)
            self._changed.notify_all()

    @property
    def requests(self) -> list[Request]:
        """The requests as they came in."""
        with self._changed:
            return list(self._requests)

    @property
    def spans(self) -> list[Span]:
        """All spans."""
        with self._changed:
            return list(self._items["traces"])

    @property
    def metric_points(self) -> list[MetricPoint]:
        """All data points of all collections: a gauge appears once for each export."""
        with self._changed:
            return list(self._items["metrics"])

    @property
    def logs(self) -> list[LogRecord]:
        """All log records, events included."""
        with self._changed:
            return list(self._items["logs"])

    def wait_for(self, predicate: Callable[[Self], object], timeout: float = 10.0) -> None:
        """Waits until `predicate(self)` is true; raises TimeoutError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: predicate(self), timeout):
                raise TimeoutError(f"not met within {timeout} s; arrived so far: {self}")

    def __str__(self) -> str:
        spans, points, logs = self.spans, self.metric_points, self.logs
        return (
            f"{len(spans)} spans {sorted({span.name for span in spans})}, "
            f"{len(points)} metric points {sorted({point.name for point in points})}, "
            f"{len(logs)} log records {sorted({record.event_name for record in logs})}"
        )


class Receiver(TelemetryStore, ABC):
    """A store with a server in front of it: a context manager that serves while it is open."""

    protocol: str
    """The value of `OTEL_EXPORTER_OTLP_PROTOCOL` that fits."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """The value of `OTEL_EXPORTER_OTLP_ENDPOINT` that fits."""

    @abstractmethod
    def start(self) -> None:
        """Begins to serve, in threads of its own."""

    @abstractmethod
    def stop(self) -> None:
        """Ends serving and waits for the threads; what arrived stays readable."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def require_loopback(host: str) -> str:
    """Returns `host` where it is a loopback IPv4 address; telemetry of others is not ours to take.

    Raises:
        ValueError: it is anything else, names included (they may resolve to anything).
    """
    with contextlib.suppress(ValueError):
        if ipaddress.IPv4Address(host).is_loopback:
            return host
    raise ValueError(f"host must be a loopback address such as 127.0.0.1, got {host!r}")


class HttpReceiver(Receiver):
    """OTLP over HTTP with binary protobuf, plain or gzip, on a port that the system chooses."""

    protocol = "http/protobuf"

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__()
        self._server = _Server((require_loopback(host), port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="otlp-http-receiver", daemon=True
        )

    @property
    def endpoint(self) -> str:
        """The base URL; SDKs append `/v1/traces` and so on."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}"

    def start(self) -> None:
        """Begins to serve; a receiver serves once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends serving, closes idle connections and frees the port. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], store: TelemetryStore) -> None:
        self.store = store
        self._connections: dict[Any, threading.Thread] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would ask the name service for the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that is killed in the middle of a request is no error of the receiver.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        # SDKs keep their connections open: without this a thread would wait on each for ever.
        for connection, thread in list(self._connections.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            thread.join(5)


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        try:
            reply = self._export(self._body()).SerializeToString()
            self._respond(HTTPStatus.OK, "application/x-protobuf", reply)
        except _RefusedError as refused:
            self._respond(refused.status, "text/plain", str(refused).encode())

    def do_GET(self) -> None:
        self._respond(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"OTLP is sent with POST")

    def log_message(self, *args: object) -> None:
        """Stays silent: the terminal belongs to the program that is watched."""

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        # What is not read would be taken for the next request of the connection.
        if not length.isdecimal():
            self.close_connection = True
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is required")
        if int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MAX_BODY_BYTES} bytes"
            )
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "the body ended early")
        return body

    def _export(self, body: bytes) -> Message:
        if self.path not in ENDPOINTS:
            raise _RefusedError(
                HTTPStatus.NOT_FOUND, f"{self.path} is none of {', '.join(ENDPOINTS)}"
            )
        signal, request_type, response_type = ENDPOINTS[self.path]
        if self.headers.get_content_type() != "application/x-protobuf":
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/x-protobuf")
        message = request_type()
        try:
            message.ParseFromString(self._decompressed(body))
        except DecodeError as error:
            raise _RefusedError(
                HTTPStatus.BAD_REQUEST, f"not a {signal} request: {error}"
            ) from error
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.store.add(signal, message, headers)
        return response_type()

    def _decompressed(self, body: bytes) -> bytes:
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding == "identity":
            return body
        if encoding != "gzip":
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"unknown encoding {encoding!r}")
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(body)) as stream:
                plain = stream.read(_MAX_BODY_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"not gzip: {error}") from error
        if len(plain) > _MAX_BODY_BYTES:
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MAX_BODY_BYTES} bytes"
            )
        return plain

    def _respond(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
