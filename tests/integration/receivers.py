# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""OTLP/gRPC receiver and real processes for the integration tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.message import Message

from otlp_data import Signal
from otlp_receiver import ENDPOINTS, Receiver, require_loopback


class GrpcReceiver(Receiver):
    """OTLP over gRPC, on a port that the system chooses."""

    protocol = "grpc"

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="otlp-grpc-receiver")
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers(
            [self._service(*signal) for signal in ENDPOINTS.values()]
        )
        port = self._server.add_insecure_port(f"{require_loopback(host)}:{port}")
        self._address = f"{host}:{port}"

    @property
    def endpoint(self) -> str:
        """The URL; `http` is what makes SDKs speak without TLS."""
        return f"http://{self._address}"

    def start(self) -> None:
        """Begins to serve."""
        self._server.start()

    def stop(self) -> None:
        """Ends serving once the requests in flight are answered. May be called twice."""
        self._server.stop(grace=1).wait()
        self._pool.shutdown()

    def _service(
        self, kind: Signal, request_type: type[Message], response_type: type[Message]
    ) -> grpc.GenericRpcHandler:
        def export(request: Message, context: grpc.ServicerContext) -> Message:
            self.add(kind, request, {k: str(v) for k, v in context.invocation_metadata()})
            return response_type()

        (service,) = request_type.DESCRIPTOR.file.services_by_name.values()
        handler = grpc.unary_unary_rpc_method_handler(
            export,
            request_deserializer=request_type.FromString,
            response_serializer=response_type.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(service.full_name, {"Export": handler})


def otlp_environment(receiver: Receiver) -> dict[str, str]:
    """Points the SDK of another process at `receiver`, with short intervals."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": receiver.protocol,
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_LOGS_EXPORTER": "otlp",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_BLRP_SCHEDULE_DELAY": "100",
        "OTEL_SERVICE_NAME": "integration-test",
        # A proxy would not find the loopback address of this machine.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


@dataclass(frozen=True)
class ScriptResult:
    """How a process ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> ScriptResult:
        """Fails the test, output shown, unless the exit code is 0."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self}"
        return self

    def __str__(self) -> str:
        return f"--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"


def run_script(
    source_or_path: str | Path,
    *,
    instrument: bool = False,
    env: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    timeout: float = 120.0,
    cwd: Path,
) -> ScriptResult:
    """Runs a Python script in a process of its own and returns how it ended.

    Args:
        source_or_path: the source, which is written to `cwd`, or the path of a script.
        instrument: run it under `opentelemetry-instrument`.
        env: variables added to the environment. `OTEL_*`, `PYTHONPATH` and `PYTHON*` settings of
            the test run itself do not reach the script.
        arguments: command-line arguments of the script.
        timeout: seconds after which the whole process group is killed and the test fails.
        cwd: an existing folder outside the checkout, whose `tunix/` would else be imported.
    """
    path = source_or_path
    if isinstance(source_or_path, str):
        path = cwd / "script.py"
        path.write_text(textwrap.dedent(source_or_path), encoding="utf-8")
    command = [sys.executable, str(path), *arguments]
    if instrument:
        command.insert(0, str(Path(sys.executable).with_name("opentelemetry-instrument")))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON"))}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**inherited, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        result = ScriptResult(process.returncode, stdout, stderr)
        raise AssertionError(f"still running after {timeout} s, killed\n{result}") from None
    return ScriptResult(process.returncode, stdout, stderr)
