# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Options: environment, arguments and config files fill one class; wrong values fall back."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.tunix import TunixInstrumentor, config, environment_variables
from opentelemetry.instrumentation.tunix.config import Options

REFERENCE = Path(__file__).parents[2] / "docs" / "telemetry.md"
DEFAULTS = Options(
    span_groups=config.SPAN_GROUPS,
    processes="zero",
    step_events=True,
    device_time=True,
    trace_per_step=None,
)


def test_defaults() -> None:
    """Everything is emitted, by process 0; the run decides about traces."""
    assert Options.load({}, {}) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("span_groups", "run, Train", frozenset({"run", "train"})),
        ("span_groups", ("eval",), frozenset({"eval"})),
        ("trace_per_step", "true", True),
        ("trace_per_step", "False", False),
        ("trace_per_step", False, False),
        ("trace_per_step", "auto", None),
        ("trace_per_step", "AUTO", None),
        ("processes", "ERRORS", "errors"),
        ("run_id", "job-17", "job-17"),
        ("run_id", 17, "17"),
        ("step_events", "0", False),
        ("step_events", False, False),
    ],
)
def test_arguments_and_environment_are_parsed_alike(name: str, text: Any, value: Any) -> None:
    """A value means the same wherever it comes from."""
    assert getattr(Options.load({name: text}, {}), name) == value
    if isinstance(text, str):
        environ = {f"OTEL_INSTRUMENTATION_TUNIX_{name.upper()}": text}
        assert getattr(Options.load({}, environ), name) == value


def test_arguments_win_over_environment_and_strangers_are_ignored() -> None:
    """What is written in the program is meant."""
    options = Options.load(
        {"processes": "all", "skip_dep_check": True},
        {"OTEL_INSTRUMENTATION_TUNIX_PROCESSES": "errors"},
    )
    assert options.processes == "all"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("span_groups", "run,tarin"),
        ("span_groups", 7),
        ("trace_per_step", "perhaps"),
        ("processes", "one"),
        ("step_events", "no!"),
        ("run_id", "  "),
    ],
)
def test_a_wrong_value_is_named_once_and_falls_back(
    name: str, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with option and value; the default counts."""
    assert Options.load({name: wrong}, {}) == DEFAULTS
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{name}={wrong!r}" in record.getMessage()


def test_an_empty_environment_variable_is_not_set(caplog: pytest.LogCaptureFixture) -> None:
    """As everywhere in OpenTelemetry."""
    environ = {f"OTEL_INSTRUMENTATION_TUNIX_{f.name.upper()}": "" for f in fields(Options)}
    assert Options.load({}, environ) == DEFAULTS
    assert caplog.records == []


def test_options_not_given_in_a_config_file_leave_the_environment_alone() -> None:
    """A declarative file hands over only the fields that are not None."""
    assert TunixInstrumentor.configuration is Options
    from_file = TunixInstrumentor.configuration(processes="all")
    handed_over = {
        f.name: getattr(from_file, f.name)
        for f in fields(from_file)
        if getattr(from_file, f.name) is not None
    }
    assert handed_over == {"processes": "all"}


def test_environment_variables_are_the_options_and_are_documented() -> None:
    """One variable for each option, in the module that makes flags of them and in the reference."""
    declared = {n for n in vars(environment_variables) if n.startswith("OTEL_")}
    assert declared == {config.PREFIX + field.name.upper() for field in fields(Options)}
    assert all(getattr(environment_variables, name) == name for name in declared)
    documented = re.findall(r"^\| `(OTEL_\w+)`", REFERENCE.read_text(encoding="utf-8"), re.M)
    assert sorted(documented) == sorted(declared)


def test_auto_in_the_program_wins_over_the_environment() -> None:
    """It is a choice like any other."""
    environ = {"OTEL_INSTRUMENTATION_TUNIX_TRACE_PER_STEP": "true"}
    assert Options.load({"trace_per_step": "auto"}, environ).trace_per_step is None


def test_a_value_that_cannot_even_be_shown_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever object is passed."""

    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    assert Options.load({"run_id": Hostile(), "processes": Hostile()}, {}) == DEFAULTS
    assert len(caplog.records) == 2
