# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""How long a process takes to end when nobody takes its telemetry."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

pytest.importorskip("opentelemetry.instrumentation.tunix", reason="tests of the instrumentor")
pytestmark = pytest.mark.slow

INSTRUMENTOR_TESTS = Path(__file__).parents[2] / "opentelemetry-instrumentation-tunix" / "tests"

# One span, one gauge and one log record of the application's own before 50 steps of training, and
# once more after them: what is in flight as the process ends delays it, whoever it belongs to.
SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(INSTRUMENTOR_TESTS)!r})
import toy_sft
from opentelemetry import _logs, metrics, trace

def own():
    with trace.get_tracer("application").start_as_current_span("own"):
        pass
    gauge.set(1)
    _logs.get_logger("application").emit(_logs.LogRecord(body="own"))

gauge = metrics.get_meter("application").create_gauge("own")
own()
toy_sft.Run(updates=50).train(toy_sft.batches(50))
own()
print(time.time(), flush=True)
"""


@pytest.fixture(params=["closed", "silent"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A port at which nobody listens, or one that takes a request and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_process_ends_hardly_later_than_with_telemetry_of_its_own_alone(
    endpoint: str, protocol: str, run_script: RunScript
) -> None:
    """At most two seconds later; what the exporters of the SDK take of their own is the same."""

    def seconds_to_exit(**env: str) -> float:
        env |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "otlp",
            "NO_PROXY": "127.0.0.1",
        }
        result = run_script(SCRIPT, instrument=True, env=env, timeout=400).check()
        return time.time() - float(result.stdout)

    control = seconds_to_exit(OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="tunix")
    ours = seconds_to_exit()
    print(f"{protocol}: {ours:.1f} s to exit, {control:.1f} s without")
    assert ours <= control + 2
