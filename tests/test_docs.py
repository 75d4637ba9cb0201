# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the pages about tunix-core say is so: their code runs, their tables are true."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from otlp_receiver import HttpReceiver

instruments = pytest.importorskip("tunix.sft._instruments", reason="tests of tunix-core")

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("metrics-logger", "migration", "models")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    text = DOCS.joinpath(f"{page}.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table(page: str, header: str) -> list[list[str]]:
    """The rows of the table whose first line begins with `header`."""
    lines = DOCS.joinpath(f"{page}.md").read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_page_runs(page: str, tmp_path: Path) -> None:
    """All blocks of a page, one after the other in one process, do and print what they say."""
    code = blocks(page, "python")
    said = re.findall(r"print\(.*\)  # (.*?)(?:, the mean)?$", "".join(code), re.MULTILINE)
    tmp_path.joinpath("page.py").write_text("\n".join(code), "utf-8")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON"))}
    with HttpReceiver() as receiver:
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_RESOURCE_ATTRIBUTES": "service.namespace=post-training",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "JAX_PLATFORMS": "cpu",
            # The oldest instrumentation package imports what setuptools deprecates.
            "PYTHONWARNINGS": "ignore:pkg_resources is deprecated:UserWarning",
        }
        result = subprocess.run(
            [sys.executable, "page.py"],
            cwd=tmp_path,
            env=inherited | settings,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines() == said
        if page != "metrics-logger":
            return
        values = {point.name: point.value for point in receiver.metric_points}
        assert values["tunix.training.loss"] == 0.7
        assert values["tunix.rewards.score.mean"] == 0.25
        assert values["tunix.training.step"] == 1
        (span,) = receiver.spans
        (event,) = receiver.logs
        assert (event.body, event.attributes["examples"]) == ("3,000 examples", 3_000)
        assert (event.trace_id, event.span_id) == (span.trace_id, span.span_id)
        for item in (span, event, receiver.metric_points[0]):
            assert item.resource["service.name"] == "sft"
            assert item.resource["service.namespace"] == "post-training"


def test_key_table_is_what_keys_become() -> None:
    """Gauge and unit of each key in the table."""
    rows = table("metrics-logger", "key")
    assert len(rows) > 5
    for row in rows:
        key, gauge, unit = (cell.strip("`") for cell in row)
        if key == "the step of each call":
            assert gauge == instruments.STEP
        else:
            assert gauge == instruments.gauge_name(key)
        assert unit == instruments._UNITS.get(gauge, ("", ""))[0]


def value_rows() -> list[list[str]]:
    """The table of values as the tests of the logger go through it."""
    from value_cases import KINDS

    return [
        [
            kind.values,
            kind.kept,
            kind.emitted or ("counter" if kind.counted else "nothing"),
            "once" if kind.warned else "no",
        ]
        for kind in KINDS
    ]


def test_value_table_is_what_values_become() -> None:
    """Row by row, each with examples that the tests of the logger try."""
    from value_cases import KINDS, VALUE_CASES

    assert table("metrics-logger", "value") == value_rows()
    assert {case.kind for case in VALUE_CASES} == set(KINDS)


RULE_TESTS = """
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: tunix_training_nonfinite_total{job="sft", tunix_metrics_name="loss"}
        values: _x20 1x30 2x30
      - series: tunix_training_step{job="sft", tunix_training_mode="train"}
        values: 1+1x40 41x60
      - series: tunix_training_step{job="sft", tunix_training_mode="eval"}
        values: 1x100
    alert_rule_test:
      - {eval_time: 19m, alertname: TunixValueNotFinite, exp_alerts: []}
      - {eval_time: 22m, alertname: TunixValueNotFinite, exp_alerts: &nan [{
          exp_labels: {job: sft, tunix_metrics_name: loss},
          exp_annotations: {summary: loss of sft is NaN or infinite}}]}
      - {eval_time: 40m, alertname: TunixValueNotFinite, exp_alerts: []}
      - {eval_time: 55m, alertname: TunixValueNotFinite, exp_alerts: *nan}
      - {eval_time: 40m, alertname: TunixStepNotAdvancing, exp_alerts: []}
      - {eval_time: 65m, alertname: TunixStepNotAdvancing, exp_alerts: [{
          exp_labels: {job: sft, tunix_training_mode: train},
          exp_annotations: {summary: sft has not finished a step for 20 minutes}}]}
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """For the first NaN, for a later one, and for a step that stands still; not before."""
    (rules,) = blocks("migration", "yaml")
    tmp_path.joinpath("rules.yml").write_text(rules, "utf-8")
    tmp_path.joinpath("tests.yml").write_text(RULE_TESTS, "utf-8")
    command = ["promtool", "test", "rules", "tests.yml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
