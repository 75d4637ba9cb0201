# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Switching on and off: nothing imported, everything restored, one wrapper at a time."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from typing import Any

import pytest
import toy_sft
from in_memory import Collected
from opentelemetry.instrumentation.tunix import TunixInstrumentor, patching, semconv, telemetry
from opentelemetry.instrumentation.tunix.targets import TARGETS


def touched_classes() -> list[type]:
    """The classes of the table that this release has."""
    classes = []
    for target in TARGETS:
        try:
            module = importlib.import_module(target.module)
        except ImportError:
            continue
        if hasattr(module, target.owner):
            classes.append(getattr(module, target.owner))
    return list(dict.fromkeys(classes))


def test_uninstrument_restores_every_class_object_by_object(collected: Collected) -> None:
    """vars() of each touched class: the same keys and the same objects."""
    classes = touched_classes()
    assert classes
    before = [dict(vars(cls)) for cls in classes]
    instrumentor = TunixInstrumentor()
    for _ in range(3):
        instrumentor.instrument(**collected.providers())
        assert any(
            vars(c)[k] is not v for c, b in zip(classes, before, strict=True) for k, v in b.items()
        )
        instrumentor.uninstrument()
        for cls, entries in zip(classes, before, strict=True):
            after = dict(vars(cls))
            assert after.keys() == entries.keys()
            assert all(after[name] is entries[name] for name in entries)


def test_everything_made_before_falls_silent(collected: Collected) -> None:
    """A trainer, its cached methods and the step it handed out keep working and emit nothing."""
    instrumentor = TunixInstrumentor()
    instrumentor.instrument(**collected.providers())
    run = toy_sft.Run(updates=4)
    step, *_ = run.trainer.jit_train_and_eval_step()
    train, log = run.trainer.train, run.trainer.metrics_logger.log
    instrumentor.uninstrument()
    gauges = collected.gauges()
    train(toy_sft.batches(2))
    log("", "loss", 1.0, "train", 1)
    arguments = () if hasattr(step, "func") else (run.model, run.trainer.optimizer)
    step(*arguments, next(toy_sft.batches(1)))
    assert collected.spans() == []
    assert collected.gauges() == gauges == {}


def test_a_live_trainer_goes_to_the_new_provider_after_instrumenting_again(
    collected: Collected,
) -> None:
    """Wrappers ask who is active at each call."""
    instrumentor = TunixInstrumentor()
    instrumentor.instrument()
    run = toy_sft.Run(updates=1)
    instrumentor.uninstrument()
    instrumentor.instrument(**collected.providers())
    try:
        run.train(toy_sft.batches(1))
    finally:
        instrumentor.uninstrument()
    assert collected.names() == [semconv.MODEL_TRAIN, semconv.RUN]


def test_instrumenting_twice_is_instrumenting_once(instrumented: Collected) -> None:
    """A notebook cell that runs again changes nothing; nor does making another instrumentor."""
    TunixInstrumentor().instrument()
    TunixInstrumentor()
    toy_sft.Run(updates=1).train(toy_sft.batches(1))
    assert instrumented.names() == [semconv.MODEL_TRAIN, semconv.RUN]


def test_unknown_arguments_are_ignored(collected: Collected) -> None:
    """Distros hand every instrumentor the same arguments."""
    TunixInstrumentor().instrument(**collected.providers(), no_such_option=1)
    assert TunixInstrumentor().is_instrumented_by_opentelemetry
    TunixInstrumentor().uninstrument()


def test_instrument_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception would abort every instrumentor that the loader has still to call."""
    monkeypatch.setattr(patching, "apply", lambda _: 1 / 0)
    TunixInstrumentor().instrument()
    TunixInstrumentor().uninstrument()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.owner}.{t.method}")
def test_any_single_target_may_be_missing(
    collected: Collected,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: patching.Target,
) -> None:
    """The release lacks it: one line at INFO, no exception, the other targets are wrapped."""
    try:
        module = importlib.import_module(target.module)
    except ImportError:
        return  # a module that this release does not have asks for nothing
    cls: Any = getattr(module, target.owner)
    # Hidden on the class and not deleted: subclasses may not fall back to an ancestor's.
    monkeypatch.setattr(cls, target.method, None)
    patching._announced.clear()
    caplog.set_level(logging.DEBUG, "opentelemetry.instrumentation.tunix")
    TunixInstrumentor().instrument(**collected.providers())
    try:
        owners = {
            other: getattr(sys.modules[other.module], other.owner)
            for other in TARGETS
            if other is not target and other.module in sys.modules
        }
        assert owners
        for other, owner in owners.items():
            assert hasattr(vars(owner)[other.method], "__wrapped__")
    finally:
        TunixInstrumentor().uninstrument()
    assert [r.levelno for r in caplog.records] == [logging.INFO]
    assert f"{target.owner}.{target.method}" in caplog.text
    assert target.gives in caplog.text


def test_importing_and_instrumenting_imports_neither_jax_nor_tunix() -> None:
    """JAX freezes JAX_PLATFORMS when it is imported; that stays the script's choice."""
    code = (
        "import sys\n"
        "from opentelemetry.instrumentation.tunix import TunixInstrumentor\n"
        "TunixInstrumentor().instrument()\n"
        "TunixInstrumentor().uninstrument()\n"
        "heavy = {'jax', 'jaxlib', 'tunix', 'numpy', 'flax', 'opentelemetry.sdk'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_tunix_instrumented_initialises_no_backend() -> None:
    """jax.distributed.initialize works after it, which needs an untouched backend."""
    code = (
        "import socket\n"
        "from opentelemetry.instrumentation.tunix import TunixInstrumentor\n"
        "TunixInstrumentor().instrument()\n"
        "import tunix.sft.peft_trainer, tunix.sft.metrics_logger as ml\n"
        "ml.MetricsLogger().log('', 'loss', 1.0, 'train', 1)\n"
        "import jax\n"
        "with socket.socket() as s:\n"
        "    s.bind(('127.0.0.1', 0))\n"
        "    port = s.getsockname()[1]\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', num_processes=1, process_id=0)\n"
        "assert jax.process_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_telemetry_is_inactive_when_not_instrumented() -> None:
    """Constructing an instrumentor activates nothing."""
    TunixInstrumentor()
    assert telemetry.active() is None
