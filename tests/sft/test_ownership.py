# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Whose a logger is: providers, processes, JAX's listeners, copies."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax._src import monitoring
from opentelemetry import metrics
from opentelemetry.metrics import _internal
from opentelemetry.util._once import Once

from tunix.sft import _process
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

Logger = MetricsLogger
Make = Callable[..., MetricsLogger]
Warnings = Callable[[str], list[str]]


# Providers ---------------------------------------------------------------------------------------


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """No global meter provider, and none left afterwards."""
    monkeypatch.delenv("OTEL_PYTHON_METER_PROVIDER", raising=False)
    monkeypatch.setattr(_internal, "_METER_PROVIDER", None)
    monkeypatch.setattr(_internal, "_METER_PROVIDER_SET_ONCE", Once())


@pytest.mark.usefixtures("no_provider")
def test_provider_set_after_the_logger_gets_the_next_value(exported: Any) -> None:
    """What was logged before stays in the history."""
    logger = MetricsLogger()
    logger.log("", "loss", 1.0, "train", 1)
    logger.log("", "other", math.nan, "train", 1)
    metrics.set_meter_provider(exported.provider)
    assert exported.points() == {}
    logger.log("", "loss", 0.5, "train", 2)
    assert exported.values() == {"tunix.training.loss": 0.5, "tunix.training.step": 2}
    assert logger.get_metric_history("", "loss", "train").tolist() == [1.0, 0.5]
    logger.close()


@pytest.mark.usefixtures("no_provider")
def test_provider_of_the_constructor_wins(exported: Any, make_logger: Make) -> None:
    """The global one gets nothing from this logger."""
    other = type(exported)()
    metrics.set_meter_provider(other.provider)
    make_logger().log("", "loss", 0.5, "train", 1)
    assert exported.value("tunix.training.loss") == 0.5
    assert other.points() == {}
    other.provider.shutdown()


def test_loggers_of_one_provider_share_instruments(
    make_logger: Make, exported: Any, warnings_of: Warnings
) -> None:
    """Actor, critic and a second run: no conflict, whatever the case of the key."""
    for prefix in ("actor", "critic", "actor"):
        logger = make_logger()
        logger.log(prefix, "loss", 0.5, "train", 1)
        logger.log(prefix, "KL" if prefix == "critic" else "kl", 0.5, "train", 1)
        logger.log(prefix, "loss", math.nan, "train", 2)
    assert len(exported.points()["tunix.training.loss"]) == 2
    assert exported.value("tunix.training.nonfinite", tunix__metrics__prefix="actor") == 2
    assert not warnings_of("opentelemetry")


def test_foreign_instrument_of_the_same_name_does_not_raise(
    make_logger: Make, exported: Any
) -> None:
    """The application's own meter `tunix` with a counter where the gauge belongs."""
    exported.provider.get_meter("tunix").create_counter("tunix.training.loss").add(3)
    logger = make_logger()
    logger.log("", "loss", 0.5, "train", 1)
    assert logger.get_metric("", "loss", "train") == 0.5
    assert exported.value("tunix.training.step") == 1


class _BrokenProvider(metrics.MeterProvider):
    def get_meter(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken provider")


def test_broken_provider_is_told_once_and_costs_no_value(warnings_of: Warnings) -> None:
    """`log` does not raise and keeps everything."""
    logger = MetricsLogger(meter_provider=_BrokenProvider())
    for step in range(3):
        logger.log("", "loss", 0.5, "train", step)
    assert len(logger.get_metric_history("", "loss", "train")) == 3
    (said,) = warnings_of("tunix")
    assert "broken provider" in said


def test_handler_that_logs_a_metric_does_not_recurse(logger: Logger) -> None:
    """A log handler may call the logger that is about to warn, and may raise."""
    calls = []

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            calls.append(record)
            logger.log("", f"warning {len(calls) % 3}", "text", "train", 1)
            raise ValueError("a handler that raises")

    handler = Counting()
    logging.getLogger("tunix").addHandler(handler)
    before = list(logging.getLogger().handlers)
    try:
        for step in range(5):
            logger.log("", "m", None, "train", step)
    finally:
        logging.getLogger("tunix").removeHandler(handler)
    assert len(calls) == 4
    assert logging.getLogger().handlers == before
    assert len(logger.get_metric_history("", "m", "train")) == 5


# Process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_process_zero_emits_unless_all_do(
    make_logger: Make,
    exported: Any,
    monkeypatch: pytest.MonkeyPatch,
    everywhere: bool,
    index: int,
) -> None:
    """With `emit_on_all_processes` each with its index; the history is everywhere."""
    monkeypatch.setattr(_process, "process_index", lambda: index)
    logger = make_logger(emit_on_all_processes=everywhere)
    logger.log("", "loss", 0.5, "train", 1)
    assert logger.get_metric("", "loss", "train") == 0.5
    emits = everywhere or index == 0
    assert set(exported.points()) == (
        {"tunix.training.loss", "tunix.training.step"} if emits else set()
    )
    if everywhere:
        assert exported.value("tunix.training.loss", tunix__jax__process__index=index) == 0.5


@pytest.mark.parametrize("index", [0, 1])
def test_emission_waits_until_the_process_index_is_known(
    make_logger: Make, exported: Any, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """The last finite value of each series with its step, and every value that is none."""
    known: list[int | None] = [None]
    monkeypatch.setattr(_process, "process_index", lambda: known[0])
    logger = make_logger(emit_on_all_processes=True)
    for step, loss in enumerate((3.0, 2.0, math.nan)):
        logger.log("", "loss", loss, "train", step)
    assert exported.points() == {}
    known[0] = index
    logger.log("", "other", 1.0, "eval", 9)
    mode = {"tunix__training__mode": "train", "tunix__jax__process__index": index}
    assert exported.value("tunix.training.loss", **mode) == 2.0
    assert exported.value("tunix.training.step", **mode) == 2
    assert exported.value("tunix.training.nonfinite", **mode) == 1


# Ownership ---------------------------------------------------------------------------------------


def test_close_leaves_the_listeners_of_jax_alone(make_logger: Make, exported: Any) -> None:
    """None is added, none is removed, and JAX's own events are no metrics of ours."""
    heard: list[str] = []
    listeners = (
        (jax.monitoring.register_event_listener, lambda event, **_: heard.append(event)),
        (jax.monitoring.register_scalar_listener, lambda event, value, **_: heard.append(event)),
    )
    kept = {
        name: list(getattr(monitoring, name))
        for name in dir(monitoring)
        if name.endswith("_listeners") and isinstance(getattr(monitoring, name), list)
    }
    for register, listener in listeners:
        register(listener)
    try:
        during = {name: len(getattr(monitoring, name)) for name in kept}
        logger = make_logger()
        logger.log("", "loss", 0.5, "train", 3)
        logger.close()
        assert {name: len(getattr(monitoring, name)) for name in kept} == during
        jax.monitoring.record_event("/mine")
        jax.monitoring.record_scalar("/other", 1.0)
        assert jax.jit(lambda x: x + 1)(1.0) == 2.0
        assert [event for event in heard if event in ("/mine", "/other")] == ["/mine", "/other"]
    finally:
        for name, before in kept.items():
            getattr(monitoring, name)[:] = before
    make_logger().log("", "loss", 0.25, "train", 4)
    assert exported.values() == {"tunix.training.loss": 0.25, "tunix.training.step": 4}


def test_close_leaves_the_provider_working(make_logger: Make, exported: Any) -> None:
    """Neither flushed nor shut down: other loggers and meters go on."""
    first = make_logger()
    first.log("", "loss", 0.5, "train", 1)
    first.close()
    exported.provider.get_meter("app").create_counter("app.requests").add(2)
    make_logger().log("", "loss", 0.25, "train", 2)
    assert exported.value("app.requests") == 2
    assert exported.value("tunix.training.loss") == 0.25


# Copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy])
def test_copy_is_a_logger_of_its_own(
    make_logger: Make, exported: Any, fake_array: Any, copy_of: Any
) -> None:
    """Same provider and options, history copied: what is logged later is apart."""
    logger = make_logger(attributes={"team": "a"})
    logger.log("", "loss", 1.0, "train", 1)
    logger.log("", "loss", fake_array(2.0), "train", 2)
    logger.log("", "text", "x", "train", 2)
    new = copy_of(logger)
    logger.log("", "loss", 9.0, "train", 3)
    new.log("", "loss", 3.0, "train", 3)
    assert new.get_metric_history("", "loss", "train").tolist() == [1.0, 2.0, 3.0]
    assert new.get_metric("", "loss", "train") == 2.0
    assert logger.get_metric_history("", "loss", "train").tolist() == [1.0, 2.0, 9.0]
    assert new.get_metric_history("", "text", "train").tolist() == ["x"]
    assert exported.value("tunix.training.loss", team="a") == 3.0
    new.close()


def test_pickle_keeps_the_history() -> None:
    """With the global providers; perplexity stays geometric."""
    logger = MetricsLogger(MetricsLoggerOptions(attributes={"team": "a"}))
    for value in (2.0, 8.0, "text"):
        logger.log("actor", "perplexity", value, "train", 1)
    new = pickle.loads(pickle.dumps(logger))
    assert new.get_metric("actor", "perplexity", "train") == pytest.approx(4.0)
    assert new.get_metric_history("actor", "perplexity", "train").tolist() == [2.0, 8.0, "text"]
    new.log("actor", "perplexity", 8.0, "train", 2)
    assert len(logger.get_metric_history("actor", "perplexity", "train")) == 3


def test_pickle_with_a_provider_is_refused_with_the_remedy(logger: Logger) -> None:
    """Providers belong to one process."""
    with pytest.raises(TypeError, match="Pickle its options"):
        pickle.dumps(logger)
