# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""An update is the same however its work is divided: over micro-batches or over devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from small_runs import (
    decoder,
    decoder_trainer,
    joined,
    losses,
    token_batches,
    weights,
    with_lora,
)

from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig


def mesh(fsdp: int, tp: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp)
    return jax.sharding.Mesh(devices, ("fsdp", "tp"))


def furthest(one: PeftTrainer, other: PeftTrainer) -> float:
    pairs = zip(weights(one), weights(other), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_four_micro_batches_are_one_batch_of_four_times_the_size(lora: bool, uneven: bool) -> None:
    def made(accumulation: int) -> PeftTrainer:
        # Plain descent: Adam would divide rounding errors by gradients that are nearly 0.
        model = with_lora(decoder()) if lora else decoder()
        config = TrainingConfig(eval_every_n_steps=99, gradient_accumulation_steps=accumulation)
        return PeftTrainer(model, optax.sgd(0.5, momentum=0.9), config)

    batches = list(token_batches(12, uneven=uneven))
    small, large = made(4), made(1)
    small.train(batches)
    large.train([joined(batches[at : at + 4]) for at in range(0, len(batches), 4)])
    assert small.train_steps == large.train_steps == 3
    assert losses(small) == pytest.approx(losses(large), rel=1e-5)
    assert furthest(small, large) <= 1e-5
    start = made(1)
    assert furthest(start, large) > 1e-3


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_mesh_of_four_devices_has_the_losses_of_one(
    fsdp: int, tp: int, accumulation: int
) -> None:
    batches = list(token_batches(6))
    one = decoder_trainer(gradient_accumulation_steps=accumulation)
    one.train(batches)
    split = decoder_trainer(decoder(mesh=mesh(fsdp, tp)), gradient_accumulation_steps=accumulation)
    places = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(split.model))]
    split.train(batches, batches[:1])
    assert losses(split) == pytest.approx(losses(one), abs=1e-4)
    assert furthest(split, one) < 1e-3
    # Weights and moments stay where they were, and nothing is compiled twice.
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(split.model))] == places
    assert split._steps.cache_size() == 1
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(split.optimizer)) if leaf.ndim == 2]
    assert moments
    assert any(not leaf.sharding.is_fully_replicated for leaf in moments)


def test_adapters_on_a_mesh_have_the_losses_of_one_device() -> None:
    batches = list(token_batches(4))
    one = decoder_trainer(with_lora(decoder()))
    one.train(batches)
    split = decoder_trainer(with_lora(decoder(mesh=mesh(2, 2))))
    split.train(batches)
    assert losses(split) == pytest.approx(losses(one), abs=1e-4)
    assert split._steps.cache_size() == 1


def test_sums_of_bfloat16_gradients_are_kept_in_float32() -> None:
    import jax.numpy as jnp

    class Halves(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros((), jnp.bfloat16))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return model.w[...].astype(jnp.float32) * x

    config = TrainingConfig(eval_every_n_steps=9, gradient_accumulation_steps=1000)
    trainer = PeftTrainer(Halves(), optax.sgd(1.0), config)
    trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(loss)
    trainer.train([np.float32(1)] * 1000)
    # In bfloat16, adding 1 to 256 changes nothing.
    assert weights(trainer)[0] == -1.0
    assert trainer.model.w[...].dtype == jnp.bfloat16


def test_a_weight_that_was_changed_from_outside_is_the_one_that_is_trained() -> None:
    trainer = decoder_trainer()
    trainer.is_managed_externally = True
    batches = list(token_batches(2))
    trainer.train(batches[:1])
    fresh = decoder(seed=9)
    nnx.update(trainer.model, nnx.state(fresh))
    trainer.train(batches[1:])
    other = decoder_trainer(decoder(seed=9))
    other.train(batches[1:])
    assert losses(trainer)[1] == losses(other)[0]
    assert trainer._steps.cache_size() == 1


def test_the_optimizers_old_state_is_donated_and_the_weights_are_not() -> None:
    trainer = decoder_trainer()
    trainer.is_managed_externally = True
    (batch,) = token_batches(1)
    trainer.train([batch])
    weight = trainer.model.embedder.input_embedding.get_raw_value()
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(trainer.optimizer)) if leaf.ndim == 2]
    trainer.train([batch])
    assert all(leaf.is_deleted() for leaf in moments)
    assert not weight.is_deleted()
