# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest training there is, with as much work for the device as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

WIDTH = 64


def trainer(
    *,
    rounds: int = 1,
    accumulation: int = 1,
    eval_every: int = 10**6,
    checkpoints: str | None = None,
    on_host: Callable[[Any], Any] | None = None,
) -> Any:
    """A trainer that is managed externally: each `train` goes on where the last one ended.

    Args:
        rounds: Matrix products of each loss.
        accumulation: Micro-batches of an update.
        eval_every: Updates between evaluations.
        checkpoints: Where to save after each update.
        on_host: Called by the device with the batch's first number; what it raises fails the step.
    """
    from tunix.sft import peft_trainer

    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        start = x
        if on_host is not None:
            start = x + jax.pure_callback(on_host, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
        y = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ x), start)
        return jnp.mean(model(jax.lax.stop_gradient(y)) ** 2)

    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=eval_every,
        max_steps=None,
        gradient_accumulation_steps=accumulation,
        checkpoint_root_directory=checkpoints,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1),
    )
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    made = peft_trainer.PeftTrainer(model, optax.sgd(1e-3), config)
    made.is_managed_externally = True
    return made.with_gen_model_input_fn(lambda batch: {"x": batch}).with_loss_fn(loss)


def batches(count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Batches that tell their number, from 1."""
    for number in range(1, count + 1):
        yield np.full((WIDTH, WIDTH), number * 1e-3, np.float32)
