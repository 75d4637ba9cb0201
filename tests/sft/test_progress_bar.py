# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The progress bar shows what the logger knows, and never stops a run."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.progress_bar import ProgressBar

MakeBar = Callable[..., ProgressBar]
PutStderr = Callable[[Any], Any]


class Terminal(io.StringIO):
    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError("the terminal has gone")
        return super().write(text)


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> PutStderr:
    """Puts something in place of stderr; not before the test runs, when pytest has its turn."""

    def put(file: Any) -> Any:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
        monkeypatch.setattr(sys, "stderr", file)
        return file

    return put


@pytest.fixture
def make_bar(logger: MetricsLogger) -> Iterator[MakeBar]:
    made: list[ProgressBar] = []

    def make(prefix: str = "", metrics_logger: Any = logger, **arguments: Any) -> ProgressBar:
        made.append(ProgressBar(prefix, metrics_logger, 0, 10, **arguments))
        return made[-1]

    yield make
    for bar in made:
        bar.close()


def test_bar_counts_steps_and_shows_means(
    logger: MetricsLogger, make_bar: MakeBar, stderr: PutStderr
) -> None:
    """The mean of all values so far, to three decimals."""
    terminal = stderr(Terminal())
    bar = make_bar("actor", description="Train")
    for step, loss in enumerate((2.0, 1.0, 1.0), start=1):
        logger.log("actor", "loss", loss, Mode.TRAIN, step)
        bar.update_metrics(["loss"], Mode.TRAIN)
        bar.update()
    assert bar.metrics == {"actor_train_loss": 1.333}
    assert bar.tqdm_bar.n == 3
    bar.close()
    assert "Train" in terminal.getvalue()
    assert "actor_train_loss=1.33" in terminal.getvalue()


def test_without_a_terminal_nothing_is_drawn(
    logger: MetricsLogger, make_bar: MakeBar, stderr: PutStderr
) -> None:
    """A log file gets no bar; the metrics are kept all the same."""
    file = stderr(io.StringIO())
    bar = make_bar()
    logger.log("", "loss", 0.5, "train", 1)
    bar.update_metrics(["loss"], "train")
    bar.update()
    bar.close()
    assert file.getvalue() == ""
    assert bar.metrics == {"train_loss": 0.5}


@pytest.mark.parametrize("file", [None, object()])
def test_process_without_a_stderr_has_no_bar(
    make_bar: MakeBar, stderr: PutStderr, file: Any
) -> None:
    """As under pythonw or a daemon."""
    stderr(file)
    bar = make_bar()
    bar.update()
    bar.close()
    assert bar.tqdm_bar.disable


def test_bar_is_closed_twice_and_updated_after(
    logger: MetricsLogger, make_bar: MakeBar, stderr: PutStderr
) -> None:
    """No exception, and nothing more is drawn."""
    terminal = stderr(Terminal())
    bar = make_bar()
    bar.update(2)
    bar.close()
    bar.close()
    drawn = terminal.getvalue()
    bar.update()
    logger.log("", "loss", 0.5, "train", 1)
    bar.update_metrics(["loss"], "train")
    assert terminal.getvalue() == drawn
    assert bar.tqdm_bar.n == 2
    assert bar.metrics == {"train_loss": 0.5}


def test_terminal_that_goes_away_is_no_error(make_bar: MakeBar, stderr: PutStderr) -> None:
    """The run goes on without a bar."""
    terminal = stderr(Terminal())
    bar = make_bar()
    bar.tqdm_bar.mininterval = bar.tqdm_bar.miniters = 0  # draw each time
    terminal.gone = True
    for _ in range(3):
        bar.update(5)
    bar.close()
    assert bar.tqdm_bar.n == 5


def test_prefix_and_name_with_underscores_are_shown(
    logger: MetricsLogger, make_bar: MakeBar
) -> None:
    """The label is made of them and never taken apart."""
    bar = make_bar("my_actor_model")
    for name in ("grad_norm", "tokens_per_sec", "eval_like_name"):
        logger.log("my_actor_model", name, 1.0, "eval", 1)
    bar.update_metrics(["grad_norm", "tokens_per_sec", "eval_like_name"], Mode.EVAL)
    assert list(bar.metrics) == [
        "my_actor_model_eval_grad_norm",
        "my_actor_model_eval_tokens_per_sec",
        "my_actor_model_eval_eval_like_name",
    ]


def test_train_is_shown_before_eval(logger: MetricsLogger, make_bar: MakeBar) -> None:
    """Also where the evaluation ran first, and where a name looks like the other mode."""
    bar = make_bar()
    for mode in ("other", "eval", "train"):
        for name in ("loss", "eval_train"):
            logger.log("", name, 1.0, mode, 1)
            bar.update_metrics([name], mode)
    assert list(bar.metrics) == [
        *("train_loss", "train_eval_train"),
        *("eval_loss", "eval_eval_train"),
        *("other_loss", "other_eval_train"),
    ]


def test_missing_metric_is_not_shown_and_stays(logger: MetricsLogger, make_bar: MakeBar) -> None:
    """An evaluation before any training step, or a metric that was never logged."""
    bar = make_bar()
    bar.update_metrics(["loss", "never"], "train")
    assert bar.metrics == {}
    logger.log("", "loss", 4.0, "eval", 0)
    logger.log("", "loss", 2.0, "eval", 0)
    bar.update_metrics(["loss", "never"], "eval")
    bar.update_metrics(["loss", "never"], "train")
    assert bar.metrics == {"eval_loss": 3.0}


def test_value_on_the_device_is_not_waited_for(
    logger: MetricsLogger, make_bar: MakeBar, fake_array: Any
) -> None:
    """What was shown stays until it is there."""
    bar, array = make_bar(), fake_array(4.0)
    logger.log("", "loss", 2.0, "train", 1)
    bar.update_metrics(["loss"], "train")
    logger.log("", "loss", array, "train", 2)
    bar.update_metrics(["loss"], "train")
    assert (bar.metrics, array.waits) == ({"train_loss": 2.0}, 0)
    array.finish()
    bar.update_metrics(["loss"], "train")
    assert bar.metrics == {"train_loss": 3.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, "text", None, [1.0, 2.0]])
def test_any_value_can_be_shown(
    logger: MetricsLogger, make_bar: MakeBar, stderr: PutStderr, value: Any
) -> None:
    """What is no number is NaN."""
    stderr(Terminal())
    bar = make_bar()
    logger.log("", "m", value, "train", 1)
    bar.update_metrics(["m"], "train")
    bar.update()
    assert not math.isfinite(bar.metrics["train_m"])


class OldLogger:
    """Has the methods of old and no others."""

    def __init__(self) -> None:
        self.values = {"loss": 0.5}

    def metric_exists(self, prefix: str, name: str, mode: str) -> bool:
        return name in self.values or name == "raises"

    def get_metric(self, prefix: str, name: str, mode: str) -> Any:
        return self.values[name]


def test_logger_with_the_old_methods_is_enough(make_bar: MakeBar) -> None:
    """One that raises for a metric costs that metric alone."""
    bar = make_bar(metrics_logger=OldLogger())
    bar.update_metrics(["raises", "loss", "missing"], Mode.TRAIN)
    assert bar.metrics == {"train_loss": 0.5}
