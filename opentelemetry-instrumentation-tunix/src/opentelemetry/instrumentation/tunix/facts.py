# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a run is: facts read off a trainer when the run begins, without any work for a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

from opentelemetry.util.types import AttributeValue

from . import semconv
from .library import Library
from .telemetry import report_failure


def of_run(trainer: Any, library: Library | None) -> dict[str, AttributeValue]:
    """Attributes of `tunix.run`.

    Args:
        trainer: A `PeftTrainer`; of a learner, only what it shares with one is read.
        library: The instrumented distribution.

    Returns:
        What could be read; a fact that a release does not offer is left out.
    """
    found: dict[str, AttributeValue] = {semconv.JAX_VERSION: sys.modules["jax"].__version__}
    if library is not None:
        found[semconv.LIBRARY_NAME] = library.name
        found[semconv.LIBRARY_VERSION] = library.version
    readers: list[tuple[str, Callable[[Any], dict[str, AttributeValue]]]] = []
    # Of the class or the instance: a property is not read for the question.
    names: set[str] = {*dir(cast("type[object]", type(trainer))), *vars(trainer)}
    if "model" in names:
        readers.append(("model", _model))
    if "train_steps" in names:
        readers.append(("plan", _plan))
    for what, reader in readers:
        try:
            found.update(reader(trainer))
        except Exception:
            report_failure(f"reading the {what} of a run")
    return found


def devices_of(trainer: Any) -> frozenset[int] | None:
    """Ids of the devices that hold a trainer's model; None where that cannot be told."""
    jax, nnx = sys.modules["jax"], sys.modules["flax.nnx"]
    parameters = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
    if not parameters:
        return None
    return frozenset(device.id for device in parameters[0].sharding.device_set)


def batch_shape(batch: Any) -> tuple[int, ...]:
    """Shape of the first array of a batch; () where there is none."""
    for leaf in sys.modules["jax"].tree.leaves(batch):
        shape = tuple(int(size) for size in getattr(leaf, "shape", ()))
        if shape:
            return shape
    return ()


def _model(trainer: Any) -> dict[str, AttributeValue]:
    jax, nnx = sys.modules["jax"], sys.modules["flax.nnx"]
    parameters = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
    adapters = jax.tree.leaves(nnx.state(trainer.model, nnx.LoRAParam))
    found: dict[str, AttributeValue] = {
        semconv.RUN_MODEL: type(trainer.model).__qualname__,
        semconv.RUN_PARAMETERS: _count(parameters),
        semconv.RUN_TRAINABLE: _count(adapters or parameters),
        semconv.RUN_ADAPTATION: "lora" if adapters else "full",
    }
    if parameters:
        sharding = parameters[0].sharding
        devices = sharding.device_set
        found[semconv.RUN_DEVICE_KIND] = next(iter(devices)).device_kind
        found[semconv.RUN_DEVICE_COUNT] = len(devices)
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None:
            found[semconv.RUN_MESH_SHAPE] = [f"{name}={n}" for name, n in mesh.shape.items()]
    return found


def _count(arrays: list[Any]) -> int:
    return sum(int(array.size) for array in arrays)


def _plan(trainer: Any) -> dict[str, AttributeValue]:
    config = trainer.config
    found: dict[str, AttributeValue] = {
        semconv.RUN_ACCUMULATION: int(config.get_with_default("gradient_accumulation_steps", 1))
    }
    if config.max_steps is not None:
        found[semconv.RUN_MAX_STEPS] = int(config.max_steps)
    if int(trainer.train_steps) > 0:
        found[semconv.RUN_RESUMED_FROM] = int(trainer.train_steps)
    return found
