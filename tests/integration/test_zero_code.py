# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Training in real processes, exported over real OTLP: zero-code and programmatic."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otlp_receiver import Receiver

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

pytest.importorskip("opentelemetry.instrumentation.tunix", reason="tests of the instrumentor")

INSTRUMENTOR_TESTS = Path(__file__).parents[2] / "opentelemetry-instrumentation-tunix" / "tests"
UPDATES, ACCUMULATION, EVAL_EVERY = 4, 2, 2

# A training script as users write it: no word about telemetry.
TRAINING = f"""
import sys, tempfile
sys.path.insert(0, {str(INSTRUMENTOR_TESTS)!r})
import tunix
assert "site-packages" in tunix.__file__, tunix.__file__
import toy_sft

def train():
    run = toy_sft.Run(
        updates={UPDATES},
        accumulation={ACCUMULATION},
        eval_every={EVAL_EVERY},
        checkpoints=tempfile.mkdtemp(),
        save_every={UPDATES},
    )
    run.train(toy_sft.batches(1000), toy_sft.eval_batches())
    print("loss", run.losses[-1])
"""
MAIN = "\nif __name__ == '__main__':\n    "

# What `opentelemetry-instrument` does for a process, in two lines for programs that call it.
PROVIDERS = """
from opentelemetry.distro import OpenTelemetryConfigurator
OpenTelemetryConfigurator().configure()
"""
INSTRUMENT = """
from opentelemetry.instrumentation.tunix import TunixInstrumentor
TunixInstrumentor().instrument()
"""


def expected_spans(runs: int = 1) -> Counter[str]:
    """Spans that the numbers of the script call for.

    One train span a micro-batch; an evaluation at the start and after every `EVAL_EVERY` updates;
    checkpoints after the first update and after the last.
    """
    return Counter(
        {
            "tunix.run": runs,
            "tunix.model.train": runs * UPDATES * ACCUMULATION,
            "tunix.model.eval": runs * (1 + UPDATES // EVAL_EVERY),
            "tunix.checkpoint.save": runs * 2,
        }
    )


def check(receiver: Receiver, runs: int = 1) -> None:
    """Spans, gauges and events of so many runs, and nothing else of ours."""
    spans = [span for span in receiver.spans if span.name.startswith("tunix.")]
    assert {span.status for span in spans} == {"UNSET"}
    ours = [span for span in spans if span.name != "tunix.jit.compile"]
    assert Counter(span.name for span in ours) == expected_spans(runs)
    by_id = {span.span_id: span for span in ours}
    compiled = [
        (span.attributes["tunix.jit.function"], by_id[span.parent_id].name)
        for span in spans
        if span not in ours and span.parent_id
    ]
    steps = [("_train_step", "tunix.model.train"), ("_eval_step", "tunix.model.eval")]
    if importlib.metadata.version("google-tunix") in ("0.1.4", "0.1.5"):
        del steps[0]  # compiled ahead of its first call, to count its operations
    assert Counter(compiled) == Counter(steps * runs)
    run_spans = {span.span_id: span for span in ours if span.name == "tunix.run"}
    for span in ours:
        if span.name != "tunix.run":
            (link,) = span.links
            run = run_spans[link.span_id]
            assert span.attributes["tunix.run.id"] == run.attributes["tunix.run.id"]
    last: dict[tuple[str, Any], Any] = {
        (p.name, p.attributes["tunix.training.mode"]): p.value
        for p in receiver.metric_points
        if p.scope.name == "tunix" and p.kind == "gauge"
    }
    assert last["tunix.training.step", "train"] == UPDATES
    assert 0 < last["tunix.training.loss", "train"] < 10
    names = Counter(log.event_name for log in receiver.logs)
    assert names["tunix.run.start"] == runs
    steps = Counter(
        log.attributes["tunix.training.step"]
        for log in receiver.logs
        if log.event_name == "tunix.training.step_completed"
        and log.attributes["tunix.training.mode"] == "train"
        and "tunix.training.loss" in log.body
    )
    assert steps == dict.fromkeys(range(1, UPDATES + 1), runs)


def test_under_opentelemetry_instrument(
    receiver: Receiver, otlp_env: Mapping[str, str], run_script: RunScript
) -> None:
    """Not a line of the script knows."""
    script = TRAINING + MAIN + "train()"
    run_script(script, instrument=True, env=otlp_env, timeout=300).check()
    check(receiver)


@pytest.mark.parametrize("when", ["before", "after"])
def test_instrumenting_before_or_after_the_import(
    http_receiver: Receiver, http_env: Mapping[str, str], run_script: RunScript, when: str
) -> None:
    """The order of the two does not matter."""
    parts = [INSTRUMENT, TRAINING] if when == "before" else [TRAINING, INSTRUMENT]
    script = PROVIDERS + "".join(parts) + MAIN + "train()"
    run_script(script, env=http_env, timeout=300).check()
    check(http_receiver)


def test_a_notebook_cell_that_is_run_twice(
    http_receiver: Receiver, http_env: Mapping[str, str], run_script: RunScript
) -> None:
    """In IPython: two runs, each traced once; the second cell run instruments nothing anew."""
    cell = PROVIDERS + INSTRUMENT + TRAINING + "\ntrain()\n"
    script = f"""
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
        for _ in range(2):
            shell.run_cell({cell!r}, store_history=True).raise_error()
    """
    run_script(script, env=http_env, timeout=300).check()
    check(http_receiver, runs=2)


def test_a_spawned_child_is_instrumented_too(
    http_receiver: Receiver, http_env: Mapping[str, str], run_script: RunScript
) -> None:
    """The parent starts a training process and trains nothing itself."""
    script = TRAINING + textwrap.dedent(
        """
        if __name__ == "__main__":
            import multiprocessing
            child = multiprocessing.get_context("spawn").Process(target=train)
            child.start()
            child.join()
            sys.exit(child.exitcode)
        """
    )
    run_script(script, instrument=True, env=http_env, timeout=300).check()
    check(http_receiver)
    pids = {span.resource.get("process.pid") for span in http_receiver.spans}
    assert len(pids) == 1


def test_without_an_sdk_it_trains_and_prints_nothing_of_ours(run_script: RunScript) -> None:
    """The API's no-op providers: same loss as the plain script, no output from telemetry."""
    plain = run_script(TRAINING + MAIN + "train()", timeout=300).check()
    silent = run_script(INSTRUMENT + TRAINING + MAIN + "train()", timeout=300).check()
    assert silent.stdout == plain.stdout != ""
    assert "opentelemetry" not in silent.stderr
