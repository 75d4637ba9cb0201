# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Names of gauges, and their instruments."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.metrics import NoOpMeterProvider, get_meter_provider
from opentelemetry.sdk.metrics import MeterProvider

from tunix.sft import _instruments
from tunix.sft._instruments import RESERVED, gauge_name, instruments_of


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "tunix.training.loss"),
        ("perplexity", "tunix.training.perplexity"),
        ("learning_rate", "tunix.training.learning_rate"),
        ("grad_norm", "tunix.training.gradient.norm"),
        ("Loss", "tunix.loss"),
        ("rewards/score mean", "tunix.rewards.score.mean"),
        ("a//b..c", "tunix.a.b.c"),
        ("/a/", "tunix.a"),
        ("kl-penalty_v2", "tunix.kl-penalty_v2"),
        ("9lives", "tunix.9lives"),
        ("größe", "tunix.gr.e"),
        ("奖励", "tunix.custom.unnamed"),
        ("", "tunix.custom.unnamed"),
        ("///", "tunix.custom.unnamed"),
        ("training/loss", "tunix.custom.training.loss"),
        ("Training loss", "tunix.custom.training.loss"),
        ("custom/x", "tunix.custom.custom.x"),
        ("a" * 300, "tunix." + "a" * 249),
        ("a" * 248 + "/b", "tunix." + "a" * 248),
    ],
)
def test_key_has_this_name(key: str, name: str) -> None:
    """Only the four known keys, in this spelling, have names of their own."""
    assert gauge_name(key) == name


@given(st.text())
def test_name_is_valid_and_deterministic(key: str) -> None:
    """ASCII, at most 255, no name of another meaning, whatever the key."""
    name = gauge_name(key)
    assert re.fullmatch(r"tunix(\.[a-z0-9_-]+)+", name)
    assert len(name) <= 255
    assert name == gauge_name(key)
    assert key in _instruments.WELL_KNOWN or name.split(".")[1] not in RESERVED - {"custom"}


@pytest.mark.parametrize("word", sorted(RESERVED))
def test_reserved_first_word_goes_below_custom(word: str) -> None:
    """So that a metric of a user never lands on telemetry of another meaning."""
    for key in (word, f"{word}/x", f" {word.upper()}.x"):
        assert gauge_name(key).startswith(f"tunix.custom.{word}")


def test_instruments_are_shared_by_provider_and_version(exported: Any) -> None:
    """One set for each scope; each instrument made once."""
    first = instruments_of(exported.provider, "1")
    assert first is not None
    assert instruments_of(exported.provider, "1") is first
    assert instruments_of(exported.provider, "2") is not first
    assert first.gauge("tunix.m") is first.gauge("tunix.m")
    assert first.nonfinite is first.nonfinite


def test_gauge_is_made_once_by_many_threads(exported: Any) -> None:
    """All get the same object."""
    instruments = instruments_of(exported.provider, "1")
    assert instruments is not None
    start, got = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        got.append(instruments.gauge("tunix.m"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_providers_of_the_api_have_no_instruments() -> None:
    """They drop everything; the stand-in for a later provider would make instruments twice."""
    assert instruments_of(NoOpMeterProvider(), "1") is None
    assert instruments_of(get_meter_provider(), "1") is None


def test_provider_is_not_kept_alive_by_its_instruments_alone() -> None:
    """A provider that was shut down and dropped leaves the cache."""
    gc.collect()
    before = len(_instruments._cache)
    provider = MeterProvider(shutdown_on_exit=False)
    assert instruments_of(provider, "1") is not None
    assert len(_instruments._cache) == before + 1
    provider.shutdown()
    del provider
    gc.collect()
    assert len(_instruments._cache) == before


class Unhashable(MeterProvider):
    __hash__ = None  # type: ignore[assignment]


def test_provider_that_cannot_be_a_key_works() -> None:
    """Its instruments are not shared."""
    provider = Unhashable(shutdown_on_exit=False)
    first = instruments_of(provider, "1")
    assert first is not None
    assert instruments_of(provider, "1") is not first
    provider.shutdown()
