# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""One table of values and one of keys, whoever logs: tunix-core, or google-tunix instrumented.

Which of the two is installed decides which implementation the tests below examine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from value_cases import VALUE_CASES

if TYPE_CHECKING:
    from receivers import ScriptResult

    RunScript = Callable[..., ScriptResult]

# Key as it is logged, and its gauge.
KEYS = {
    "loss": "tunix.training.loss",
    "perplexity": "tunix.training.perplexity",
    "learning_rate": "tunix.training.learning_rate",
    "grad_norm": "tunix.training.gradient.norm",
    "rewards/score mean": "tunix.rewards.score.mean",
    "a/b": "tunix.a.b",
    "a.b": "tunix.a.b",
    "A/B": "tunix.a.b",
    "training/loss": "tunix.custom.training.loss",
    "time": "tunix.custom.time",
    "奖励": "tunix.custom.unnamed",
    "///": "tunix.custom.unnamed",
}

SCRIPT = """
import json, logging, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, {tests!r})
import jax
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from value_cases import VALUE_CASES
from tunix.sft.metrics_logger import MetricsLogger

reader = InMemoryMetricReader()
provider = MeterProvider([reader])
try:
    logger = MetricsLogger(meter_provider=provider)
except TypeError:
    from opentelemetry.instrumentation.tunix import TunixInstrumentor
    TunixInstrumentor().instrument(meter_provider=provider)
    logger = MetricsLogger()
jax.devices()

said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
for name in ("tunix", "opentelemetry"):
    logging.getLogger(name).addHandler(Handler(logging.WARNING))

for index, case in enumerate(VALUE_CASES):
    for step in (1, 2):
        logger.log("values", f"m{{index}}", case.make(), "train", step)
for number, key in enumerate({keys!r}):
    logger.log("keys", key, float(number), "train", 3)
logger.close()

points = []
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                points.append([scope.scope.name, metric.name, dict(point.attributes), point.value])
print(json.dumps({{"points": points, "said": said}}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process that logged every case emitted and warned about."""
    from receivers import run_script

    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), keys=list(KEYS))
    result = run_script(
        script,
        cwd=tmp_path_factory.mktemp("values"),
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        timeout=180,
    ).check()
    return json.loads(result.stdout.splitlines()[-1])


def values_of(outcome: Mapping[str, Any], name: str, key: str) -> list[float]:
    return [
        value
        for scope, metric, attributes, value in outcome["points"]
        if (scope, metric, attributes.get("tunix.metrics.name", key)) == ("tunix", name, key)
    ]


@pytest.mark.parametrize(
    ("index", "case"), [pytest.param(i, c, id=str(c)) for i, c in enumerate(VALUE_CASES)]
)
def test_a_value_is_emitted_counted_and_warned_about_as_the_table_says(
    outcome: dict[str, Any], index: int, case: Any
) -> None:
    """The same gauge value, the same count of non-finite ones, the same warning once a key."""
    key = f"m{index}"
    expected = [] if case.emitted is None else [case.emitted]
    assert values_of(outcome, f"tunix.{key}", key) == expected
    assert values_of(outcome, "tunix.training.nonfinite", key) == [2] * case.counted
    assert sum(f"'{key}'" in text for text in outcome["said"]) == case.warned


@pytest.mark.parametrize("key", KEYS)
def test_a_key_becomes_the_gauge_that_the_rules_say(outcome: dict[str, Any], key: str) -> None:
    """Keys that normalise alike are apart by their attribute."""
    assert values_of(outcome, KEYS[key], key) == [float(list(KEYS).index(key))]
