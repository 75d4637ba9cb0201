# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""However a training process ends: its exit code, its spans' status, and the steps before."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from receivers import otlp_environment

from otlp_receiver import HttpReceiver

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

pytest.importorskip("opentelemetry.instrumentation.tunix", reason="tests of the instrumentor")

INSTRUMENTOR_TESTS = Path(__file__).parents[2] / "opentelemetry-instrumentation-tunix" / "tests"

# The data ends the process in its own way after three batches, between two steps.
SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import toy_sft

def on_term(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, on_term)
# A shell that runs the tests in the background has Ctrl-C ignored by all its descendants.
signal.signal(signal.SIGINT, signal.default_int_handler)
handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]

def data():
    yield from toy_sft.batches(3)
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    {ending}

toy_sft.Run(updates=100).train(data())
print("trained to the end")
"""


@pytest.mark.parametrize(
    ("ending", "exit_code", "status", "attribute", "value"),
    [
        ("raise ValueError('bad')", 1, "ERROR", "error.type", "ValueError"),
        ("sys.exit(0)", 0, "UNSET", "tunix.interrupted", "SystemExit"),
        ("sys.exit(3)", 3, "ERROR", "error.type", "SystemExit"),
        (
            "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
            -signal.SIGINT,
            "UNSET",
            "tunix.interrupted",
            "KeyboardInterrupt",
        ),
        (
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
            7,
            "ERROR",
            "error.type",
            "SystemExit",
        ),
    ],
    ids=["exception", "exit-0", "exit-3", "ctrl-c", "sigterm-with-handler"],
)
def test_the_process_ends_as_it_would_and_everything_before_arrives(
    http_receiver: HttpReceiver,
    run_script: RunScript,
    ending: str,
    exit_code: int,
    status: str,
    attribute: str,
    value: str,
) -> None:
    """Three whole steps, a run that tells how it ended, and no signal handler of ours."""
    script = SCRIPT.format(tests=str(INSTRUMENTOR_TESTS), ending=ending)
    result = run_script(script, instrument=True, env=otlp_environment(http_receiver), timeout=120)
    assert result.returncode == exit_code, result
    assert "trained to the end" not in result.stdout
    steps = [s for s in http_receiver.spans if s.name == "tunix.model.train"]
    assert [s.attributes["tunix.training.step"] for s in steps] == [1, 2, 3]
    assert {s.status for s in steps} == {"UNSET"}
    (run,) = [s for s in http_receiver.spans if s.name == "tunix.run"]
    assert run.status == status
    assert run.attributes[attribute] == value
    assert [log.event_name for log in http_receiver.logs].count("tunix.run.start") == 1
    # google-tunix logs a step when the next one has been dispatched: the third is not logged.
    logged = [
        log.attributes["tunix.training.step"]
        for log in http_receiver.logs
        if log.event_name == "tunix.training.step_completed" and "tunix.training.loss" in log.body
    ]
    assert logged == [1, 2]
