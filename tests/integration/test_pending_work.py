# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""A process that ends while the device still works: its own exit code, and nothing lost."""

from __future__ import annotations

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

# Three steps of some hundred milliseconds each, none of which is waited for.
SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import linear_sft
import jax

trainer = linear_sft.trainer(rounds=15_000)
step, *_ = trainer.jit_train_and_eval_step()
bound = () if hasattr(step, "func") else (trainer.model, trainer.optimizer)
first, second, third = linear_sft.batches(3)
jax.block_until_ready(step(*bound, first)[0])
step(*bound, second)
newest = step(*bound, third)[0]
print("pending" if not newest.is_ready() else "done", flush=True)
{ending}
"""

# A worker as multiprocessing forks it. One that leaves through the interpreter's exit hooks hangs
# or aborts in those of JAX, instrumented or not.
FORK = """
import multiprocessing, warnings
warnings.simplefilter("ignore", RuntimeWarning)  # JAX, about the fork
child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
child.start()
child.join()
sys.exit(child.exitcode + 1)
"""


@pytest.mark.parametrize("runs", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('bad')", 1), (FORK, 6)],
    ids=["end", "exit-3", "exception", "forked-child"],
)
def test_a_process_that_ends_while_the_device_works_keeps_its_exit_code_and_every_span(
    http_receiver: HttpReceiver, run_script: RunScript, ending: str, exit_code: int, runs: int
) -> None:
    """It waits for the device as JAX does; a thread left inside JAX would abort the process."""
    script = SCRIPT.format(tests=str(INSTRUMENTOR_TESTS), ending=ending)
    env = otlp_environment(http_receiver)
    for number in range(1, runs + 1):
        result = run_script(script, instrument=True, env=env, timeout=120)
        assert result.returncode == exit_code, result
        assert result.stdout == "pending\n"
        assert "Fatal" not in result.stderr, result
        assert ("Traceback" in result.stderr) == ("raise" in ending), result
        steps = [s for s in http_receiver.spans if s.name == "tunix.model.train"]
        assert len(steps) == 3 * number
        for span in steps[-3:]:
            assert span.attributes["tunix.host_only"] is False
            assert span.attributes["tunix.device.duration"] > 0.01
            assert span.status == "UNSET"
