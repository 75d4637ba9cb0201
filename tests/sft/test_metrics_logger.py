# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a `MetricsLogger` keeps and what it emits."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from value_cases import NOT_KEPT, VALUE_CASES, ValueCase, same

import tunix
from tunix.sft._gauges import MAX_SERIES
from tunix.sft.metrics_logger import MetricsLogger, Mode

Logger = MetricsLogger
Make = Callable[..., MetricsLogger]
Warnings = Callable[[str], list[str]]


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_value_becomes_what_the_table_says(
    logger: Logger, exported: Any, warnings_of: Warnings, case: ValueCase
) -> None:
    """Kept, emitted, counted, warned about once; a good metric beside it is in the same batch."""
    for step in (1, 2):
        logger.log("", "m", case.make(), "train", step)
    logger.log("", "loss", 0.5, "train", 3)
    if case.kept is NOT_KEPT:
        assert not logger.metric_exists("", "m", "train")
    else:
        kept = logger.get_metric_history("", "m", "train")
        assert len(kept) == 2
        assert same(kept[0], case.kept), kept[0]
        assert same(kept[1], case.kept), kept[1]
        mean = logger.get_metric("", "m", "train")
        assert type(mean) is np.float64
        assert same(float(mean), math.nan if case.number is None else case.number)
    assert exported.value("tunix.training.loss") == 0.5
    assert exported.value("tunix.training.step") == 3
    assert exported.value("tunix.m") == case.emitted
    assert exported.value("tunix.training.nonfinite") == (2 if case.counted else None)
    said = warnings_of("tunix")
    assert len(said) == case.warned
    assert all("'m'" in text for text in said)
    assert not warnings_of("opentelemetry")


@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_value_leaves_a_metric_of_numbers_readable(logger: Logger, case: ValueCase) -> None:
    """After a number, whatever the shape or type: no exception, and every other entry as it was."""
    logger.log("", "m", 2.0, "train", 1)
    logger.log("", "m", case.make(), "train", 2)
    logger.log("", "m", np.array([[4.0]]), "train", 3)
    kept = logger.get_metric_history("", "m", "train")
    expected = [2.0, 4.0] if case.kept is NOT_KEPT else [2.0, case.kept, 4.0]
    assert [same(a, b) for a, b in zip(kept, expected, strict=True)] == [True] * len(expected)
    numbers = [2.0, 4.0] if case.number is None else [2.0, case.number, 4.0]
    assert same(float(logger.get_metric("", "m", "train")), sum(numbers) / len(numbers))


def test_gauge_gets_a_python_float(exported: Any, logger: Logger) -> None:
    """Not a NumPy scalar, not a bool: only what every encoder takes."""
    for index, case in enumerate(VALUE_CASES):
        logger.log("", f"m{index}", case.make(), "train", np.int64(index))
    logger.close()
    points = [point for found in exported.points().values() for point in found]
    assert {type(value) for _, value in points} == {float, int}
    assert {type(value) for found, _ in points for value in found.values()} == {str}


def test_copies_are_kept_of_what_may_change(logger: Logger) -> None:
    """A list or an array that is logged and changed afterwards stays in the history as it was."""
    values, array = [1.0, 2.0], np.array([1.0, 2.0])
    logger.log("", "m", values, "train", 1)
    logger.log("", "m", array, "train", 2)
    values[0] = array[0] = 9.0
    kept = logger.get_metric_history("", "m", "train")
    assert kept[0] == [1.0, 2.0]
    assert kept[1].tolist() == [1.0, 2.0]


def test_bfloat16_is_averaged_in_float64(logger: Logger) -> None:
    """A thousand values that bfloat16 itself could not add up."""
    value = float(jnp.bfloat16(1.001))
    for step in range(1000):
        logger.log("", "m", jnp.bfloat16(1.001) if step % 100 == 0 else value, "train", step)
    assert logger.get_metric("", "m", "train") == pytest.approx(value, rel=1e-12)


# History -----------------------------------------------------------------------------------------


def test_history_is_float64_in_log_order(logger: Logger) -> None:
    """Numbers alone are one float64 array; every call returns a new one."""
    for value in (3, 1.0, np.float32(2.0)):
        logger.log("actor", "loss", value, Mode.TRAIN, 1)
    first = logger.get_metric_history("actor", "loss", Mode.TRAIN)
    assert (first.dtype, first.tolist()) == (np.float64, [3.0, 1.0, 2.0])
    first[:] = 0
    logger.log("actor", "loss", 4.0, Mode.TRAIN, 2)
    assert logger.get_metric_history("actor", "loss", Mode.TRAIN).tolist() == [3, 1, 2, 4]
    assert logger.get_metric("actor", "loss", Mode.TRAIN) == 2.5


def test_history_with_an_object_has_dtype_object(logger: Logger) -> None:
    """Numbers stay where they are; the mean leaves out what is none."""
    for value in (1.0, "text", 2.0, 2**53 + 1, None):
        logger.log("", "m", value, "train", 1)
    kept = logger.get_metric_history("", "m", "train")
    assert (kept.dtype, kept.tolist()) == (object, [1.0, "text", 2.0, 2**53 + 1, None])
    assert logger.get_metric("", "m", "train") == (3.0 + 2.0**53) / 3


@pytest.mark.parametrize("read", ["get_metric", "get_metric_history"])
def test_missing_metric_raises_and_is_named(logger: Logger, read: str) -> None:
    """ValueError with prefix, name and mode; another mode or prefix is another metric."""
    logger.log("actor", "loss", 1.0, "train", 1)
    with pytest.raises(ValueError, match=r"'loss' with prefix 'actor' .* mode 'eval'"):
        getattr(logger, read)("actor", "loss", Mode.EVAL)
    assert logger.metric_exists("actor", "loss", "train")
    assert not logger.metric_exists("actor", "loss", "eval")
    assert not logger.metric_exists("", "loss", "train")
    assert logger.peek_metric("", "loss", "train") is None


def test_mean_of_perplexities_is_geometric(logger: Logger) -> None:
    """The perplexity of the mean loss, for this key only."""
    for value in (2.0, 8.0):
        logger.log("", "perplexity", value, "eval", 1)
        logger.log("", "other", value, "eval", 1)
    assert logger.get_metric("", "perplexity", "eval") == pytest.approx(4.0)
    assert logger.get_metric("", "other", "eval") == 5.0


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([math.inf, 2.0], math.inf),
        ([0.0, 2.0], 0.0),
        ([math.nan, 2.0], math.nan),
        ([-1.0, 2.0], math.nan),
        ([np.float32(1e38), 1e38], pytest.approx(1e38)),
        ([1.7e308, 1.7e308], pytest.approx(1.7e308)),
        ([10**400, 2.0], math.inf),
    ],
)
def test_perplexity_that_overflows_is_quiet(
    logger: Logger, exported: Any, values: list[Any], mean: Any
) -> None:
    """No exception, no NumPy warning; later finite steps are exported again."""
    for value in values:
        logger.log("", "perplexity", value, "train", 1)
    got = float(logger.get_metric("", "perplexity", "train"))
    assert got == mean or (math.isnan(got) and math.isnan(mean))
    logger.log("", "perplexity", 3.0, "train", 2)
    assert exported.value("tunix.training.perplexity") == 3.0


def test_nan_shows_in_the_mean_and_only_there(logger: Logger) -> None:
    """The mean is NaN as soon as one number is; the history of single steps stays usable."""
    for step, value in enumerate((0.5, math.nan, 0.8)):
        logger.log("", "reward", value, "train", step)
    assert math.isnan(logger.get_metric("", "reward", "train"))
    assert np.nanmean(logger.get_metric_history("", "reward", "train")) == pytest.approx(0.65)


def test_running_mean_equals_the_mean_of_the_history(logger: Logger) -> None:
    """Also across the blocks in which the sum is brought up to date, read or not."""
    values = np.random.default_rng(0).normal(size=5000)
    for step, value in enumerate(values.tolist(), start=1):
        logger.log("", "m", value, "train", step)
        if step in (1, 1022, 1023, 1024, 3000, 5000):
            assert logger.get_metric("", "m", "train") == pytest.approx(values[:step].mean())


# Emission ----------------------------------------------------------------------------------------


def test_known_keys_have_gauges_of_their_own(logger: Logger, exported: Any) -> None:
    """Name, unit and attributes; the step is a gauge and never an attribute."""
    for key in ("loss", "perplexity", "learning_rate", "grad_norm"):
        logger.log("", key, 1.5, Mode.TRAIN, 7)
    train = {"tunix.training.mode": "train"}
    assert exported.points() == {
        "tunix.training.loss": [(train, 1.5)],
        "tunix.training.perplexity": [(train, 1.5)],
        "tunix.training.learning_rate": [(train, 1.5)],
        "tunix.training.gradient.norm": [(train, 1.5)],
        "tunix.training.step": [(train, 7)],
    }
    logger.log("", "loss", 1.0, Mode.TRAIN, 8)
    assert exported.scopes() == {("tunix", tunix.__version__)}


def test_other_keys_carry_the_key_and_the_prefix(logger: Logger, exported: Any) -> None:
    """The key as it was logged, the prefix when it is not empty."""
    logger.log("actor", "rewards/score mean", 0.5, "eval", 3)
    group = {"tunix.training.mode": "eval", "tunix.metrics.prefix": "actor"}
    assert exported.points() == {
        "tunix.rewards.score.mean": [({**group, "tunix.metrics.name": "rewards/score mean"}, 0.5)],
        "tunix.training.step": [(group, 3)],
    }


def test_keys_that_normalise_alike_stay_apart(
    logger: Logger, exported: Any, warnings_of: Warnings
) -> None:
    """No value hides another: the attribute has the key, and the history every series."""
    keys = ["a/b", "a.b", "a b", "A/B", "奖励", "", "///"]
    for value, key in enumerate(keys):
        logger.log("", key, float(value), "train", 1)
    points = exported.points()
    assert set(points) == {"tunix.a.b", "tunix.custom.unnamed", "tunix.training.step"}
    found = points["tunix.a.b"] + points["tunix.custom.unnamed"]
    assert {a["tunix.metrics.name"]: v for a, v in found} == {k: v for v, k in enumerate(keys)}
    assert [logger.get_metric("", key, "train") for key in keys] == list(range(7))
    assert not warnings_of("opentelemetry")


class _OldMode(str, enum.Enum):  # noqa: UP042  formats as "_OldMode.TRAIN"
    TRAIN = "train"


def test_mode_and_its_string_are_one_series(logger: Logger, exported: Any) -> None:
    """An enum of any kind is its value, in the history as in the attribute."""
    for value, mode in enumerate((Mode.TRAIN, "train", _OldMode.TRAIN)):
        logger.log("", "loss", float(value), mode, value)
    for mode in (Mode.TRAIN, "train", _OldMode.TRAIN):
        assert logger.get_metric_history("", "loss", mode).tolist() == [0.0, 1.0, 2.0]
    assert exported.points()["tunix.training.loss"] == [({"tunix.training.mode": "train"}, 2.0)]
    assert (str(Mode.TRAIN), f"{Mode.EVAL}") == ("train", "eval")


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (10, 10),
        (np.int64(11), 11),
        (True, 1),
        (12.0, 12),
        (-1, -1),
        (2**63 - 1, 2**63 - 1),
        (2**63, 5),
        (-(2**63) - 1, 5),
        (None, 5),
        ("6", 5),
        (6.5, 5),
        (math.nan, 5),
        ([1, 2], 5),
    ],
)
def test_step_is_a_plain_int64_or_stays(
    logger: Logger, exported: Any, step: Any, shown: int
) -> None:
    """What is no whole number within int64 leaves the step gauge alone, and the value goes out."""
    logger.log("", "loss", 0.25, "train", 5)
    logger.log("", "loss", 0.5, "train", step)
    found = exported.value("tunix.training.step")
    assert (type(found), found) == (int, shown)
    assert exported.value("tunix.training.loss") == 0.5
    assert logger.get_metric_history("", "loss", "train").tolist() == [0.25, 0.5]


def test_step_may_be_a_jax_array(logger: Logger, exported: Any, fake_array: Any) -> None:
    """Also one that is still computed; value and step wait for each other."""
    logger.log("", "loss", 0.5, "train", jnp.asarray(12))
    assert exported.value("tunix.training.step") == 12
    step = fake_array(13)
    logger.log("", "loss", 0.25, "train", step)
    assert exported.value("tunix.training.loss") in (None, 0.5)
    step.finish()
    logger.close()
    values = exported.values()
    assert (values["tunix.training.loss"], values["tunix.training.step"]) == (0.25, 13)


def test_repeated_and_descending_steps_are_all_kept(logger: Logger, exported: Any) -> None:
    """The gauge shows the call that came last, with its own step."""
    for value, step in enumerate((10, 10, 5)):
        logger.log("", "loss", float(value), "train", step)
    assert logger.get_metric_history("", "loss", "train").tolist() == [0.0, 1.0, 2.0]
    assert exported.value("tunix.training.step") == 5
    assert exported.value("tunix.training.loss") == 2.0


def test_nan_counts_and_the_step_moves_on(logger: Logger, exported: Any) -> None:
    """At the step of a NaN the gauge keeps its value, the counter and the step gauge tell."""
    for step, loss in enumerate((1.0, math.nan, 0.9, math.inf), start=1):
        logger.log("", "loss", loss, "train", step)
    assert exported.value("tunix.training.loss") == 0.9
    assert exported.value("tunix.training.step") == 4
    assert exported.value("tunix.training.nonfinite", tunix__metrics__name="loss") == 2
    assert same(
        logger.get_metric_history("", "loss", "train"), np.array([1, math.nan, 0.9, math.inf])
    )


def test_text_metric_is_no_gauge(logger: Logger, exported: Any, warnings_of: Warnings) -> None:
    """Completions in the metrics dict: one warning a key however often, and no series."""
    for step in range(5):
        logger.log("global", "completions", np.array(["a", "b"]), "train", step)
        logger.log("global", "m", np.array(["x"], dtype=object), "train", step)
        logger.log("global", "loss", 0.5, "train", step)
    assert set(exported.points()) == {"tunix.training.loss", "tunix.training.step"}
    assert len(warnings_of("tunix")) == 2
    assert logger.get_metric("global", "loss", "train") == 0.5


def test_new_names_beyond_the_limit_are_dropped(
    logger: Logger, exported: Any, warnings_of: Warnings
) -> None:
    """Ids in names cost bounded memory and one warning; what was there goes on."""
    logger.log("", "loss", 1.0, "train", 0)
    for index in range(MAX_SERIES + 50):
        logger.log("", f"reward/{index}", 1.0, "train", index)
    logger.log("run-17", "loss", 1.0, "train", 1)
    logger.log("", "loss", 2.0, "train", 1)
    (said,) = warnings_of("tunix")
    assert "4,096" in said
    assert not logger.metric_exists("", f"reward/{MAX_SERIES}", "train")
    assert not logger.metric_exists("run-17", "loss", "train")
    assert logger.get_metric("", "loss", "train") == 1.5
    assert exported.value("tunix.training.loss") == 2.0


def test_names_of_any_type_are_their_text(logger: Logger, exported: Any) -> None:
    """None is an empty prefix; what is not hashable or has lone surrogates does no harm."""
    logger.log(None, 7, 0.5, "train", 1)
    logger.log(["a"], "loss", 0.25, "train", 1)
    logger.log("", "bad \ud800 key", 0.75, "train", 1)
    assert logger.get_metric("", "7", "train") == 0.5
    assert logger.get_metric(["a"], "loss", "train") == 0.25
    assert exported.value("tunix.7") == 0.5
    assert exported.value("tunix.bad.key", tunix__metrics__name="bad \\ud800 key") == 0.75


def test_attributes_of_the_options_are_on_every_gauge(make_logger: Make, exported: Any) -> None:
    """The counter too; the library's own keys cannot be replaced."""
    logger = make_logger(attributes={"team": "alignment", "tunix.training.mode": "mine"})
    logger.log("", "loss", 0.5, "train", 1)
    logger.log("", "loss", math.nan, "train", 1)
    for found in exported.points().values():
        ((attributes, _),) = found
        assert attributes["team"] == "alignment"
        assert attributes["tunix.training.mode"] == "train"


def test_disabled_logger_keeps_and_does_not_emit(make_logger: Make, exported: Any) -> None:
    """`enabled=False` is about emission alone."""
    logger = make_logger(enabled=False)
    logger.log("", "loss", 0.5, "train", 1)
    logger.log("", "loss", jnp.float32(1.5), "train", 1)
    logger.log("", "loss", math.nan, "train", 1)
    assert same(logger.get_metric_history("", "loss", "train"), np.array([0.5, 1.5, math.nan]))
    logger.close()
    assert exported.points() == {}


def test_log_under_a_trace_leaks_no_tracer(
    logger: Logger, exported: Any, warnings_of: Warnings
) -> None:
    """In jit, vmap, grad, eval_shape and checkpoint: compiled as without, one warning."""

    def loss(x: Any) -> Any:
        logger.log("", "traced", x, "train", 1)
        logger.log("", "traced", {"a": [x]}, "train", x)
        logger.log("", "loss", 0.5, "train", x)
        return x * x

    with jax.check_tracer_leaks():
        assert jax.jit(loss)(3.0) == 9.0
        assert jax.vmap(loss)(jnp.ones(3)).tolist() == [1.0] * 3
        assert jax.grad(jax.checkpoint(loss))(3.0) == 6.0
        assert jax.eval_shape(loss, 3.0).shape == ()
    assert len(warnings_of("tunix")) == 1
    kept = logger.get_metric_history("", "traced", "train")
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(kept.tolist()))
    assert logger.get_metric("", "loss", "train") == 0.5
    assert exported.value("tunix.training.loss") == 0.5
