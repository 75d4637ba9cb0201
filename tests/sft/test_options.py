# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Options as they come from YAML files, command lines and other programs."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

Options = MetricsLoggerOptions


def test_defaults() -> None:
    """Everything is optional and on; nothing names a back end."""
    assert dataclasses.asdict(Options()) == {
        "log_dir": None,
        "project_name": "tunix",
        "run_name": "",
        "flush_every_n_steps": 100,
        "backend_kwargs": {},
        "enabled": True,
        "emit_on_all_processes": False,
        "attributes": {},
        "backend_factories": None,
    }


def test_null_of_a_yaml_file_is_the_default() -> None:
    """For every option."""
    names = [field.name for field in dataclasses.fields(Options)]
    assert Options(**dict.fromkeys(names)) == Options()  # type: ignore[arg-type]


def test_positional_order_is_that_of_before() -> None:
    """log_dir, project_name, run_name, flush_every_n_steps."""
    options = Options("/tmp/logs", "project", "run", 20)
    assert (options.log_dir, options.project_name) == ("/tmp/logs", "project")
    assert (options.run_name, options.flush_every_n_steps) == ("run", 20)


@pytest.mark.parametrize("name", ["enabled", "emit_on_all_processes"])
@pytest.mark.parametrize("text", ["true", "True", " YES ", "on", "1", 1, True, np.True_])
def test_text_for_true_is_true(name: str, text: Any) -> None:
    """As YAML and command lines write it."""
    assert getattr(Options(**{name: text}), name) is True


@pytest.mark.parametrize("name", ["enabled", "emit_on_all_processes"])
@pytest.mark.parametrize("text", ["false", "False", "no", " OFF", "0", 0, False, np.False_])
def test_text_for_false_is_false(name: str, text: Any) -> None:
    """A string that is not empty is not simply true."""
    assert getattr(Options(**{name: text}), name) is False


@pytest.mark.parametrize(
    ("option", "value", "got"),
    [
        ("enabled", "maybe", "'maybe'"),
        ("enabled", "", "''"),
        ("emit_on_all_processes", 2, "2"),
        ("flush_every_n_steps", -1, "-1"),
        ("flush_every_n_steps", 0, "0"),
        ("flush_every_n_steps", "often", "'often'"),
        ("flush_every_n_steps", 2.5, "2.5"),
        ("flush_every_n_steps", True, "True"),
        ("log_dir", 3, "3"),
        ("project_name", ["a"], r"\['a'\]"),
        ("run_name", {"a": 1}, "{'a': 1}"),
        ("attributes", "team=a", "'team=a'"),
        ("attributes", {"": "a"}, "''"),
        ("attributes", {3: "a"}, "3"),
        ("attribute 'k'", {"k": None}, "None"),
        ("attribute 'k'", {"k": [1, 2]}, r"\[1, 2\]"),
        ("attribute 'k'", {"k": 2**63}, str(2**63)),
        ("attribute 'k'", {"k": float("nan")}, "nan"),
    ],
)
def test_impossible_value_is_refused(option: str, value: Any, got: str) -> None:
    """ValueError says which option and what it got."""
    name = "attributes" if isinstance(value, dict) and option != "run_name" else option
    with pytest.raises(ValueError, match=f"^{option} must .* got {got}$"):
        Options(**{name: value})


def test_numbers_and_paths_may_be_text() -> None:
    """A command line has nothing else."""
    options = Options(flush_every_n_steps="20", run_name=7)  # type: ignore[arg-type]
    assert (options.flush_every_n_steps, options.run_name) == (20, "7")
    assert Options(flush_every_n_steps=np.int32(5)).flush_every_n_steps == 5  # type: ignore[arg-type]
    path = pathlib.Path("/tmp") / "logs"
    assert Options(log_dir=path).log_dir == "/tmp/logs"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("enable_opentelemetry", "enabled=True"),
        ("otel_meter_provider", "meter_provider to MetricsLogger"),
        ("metric_prefix", "metrics_prefix"),
        ("log_dirs", "the options are attributes, "),
    ],
)
def test_unknown_option_is_refused_with_a_remedy(name: str, remedy: str) -> None:
    """ValueError, not a bare TypeError."""
    with pytest.raises(ValueError, match=f"unknown metrics logging option '{name}'.*{remedy}"):
        Options(**{name: "x"})


@pytest.mark.parametrize(
    "old",
    [
        {"backend_kwargs": {"wandb": {"project": "p", "config": {"a": [1]}}}},
        {"backend_factories": [lambda: None]},
        {"backend_kwargs": {"tensorboard": {}}, "backend_factories": [print]},
    ],
)
def test_back_ends_are_deprecated_with_one_warning(old: dict[str, Any]) -> None:
    """It points at the caller and says where exporters belong; a copy does not warn again."""
    with pytest.warns(DeprecationWarning, match="OpenTelemetry SDK") as caught:
        options = Options(**old)
    assert [warning.filename for warning in caught] == [__file__]
    assert options == Options()
    assert dataclasses.replace(options, run_name="r").run_name == "r"
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options


def test_options_copy_pickle_and_compare() -> None:
    """Whatever is in them; a copy is independent."""
    options = Options("/logs", run_name="r", attributes={"team": "a", "n": 1, "x": 1.5, "b": True})
    copies = [
        copy.copy(options),
        copy.deepcopy(options),
        pickle.loads(pickle.dumps(options)),
        dataclasses.replace(options),
    ]
    assert copies == [options] * 4
    copies[1].attributes["team"] = "b"
    assert options.attributes["team"] == "a"
    assert dataclasses.replace(options, enabled="no") != options
    assert MetricsLogger(options).metric_exists("", "loss", "train") is False


def test_attributes_are_plain_and_the_librarys_own_are_dropped(warnings_of: Any) -> None:
    """NumPy scalars become Python's; keys below `tunix.` give one warning each."""
    given = {"a": np.float32(1.5), "b": np.int64(3), "c": "\ud800", "tunix.training.mode": "x"}
    options = Options(attributes=given)
    assert options.attributes == {"a": 1.5, "b": 3, "c": "\\ud800"}
    assert [type(value) for value in options.attributes.values()] == [float, int, str]
    (said,) = warnings_of("tunix")
    assert "'tunix.training.mode'" in said
    assert given["c"] == "\ud800"
