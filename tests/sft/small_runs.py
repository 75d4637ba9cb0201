# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Training runs of a second or less: a model of one number, and a decoder with or without LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tunix.models.llama3 import model as llama3
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

BATCH, LENGTH, VOCABULARY = 4, 12, 32


class Number(nnx.Module):
    """A model of one weight, 0 at first."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))


def number_trainer(loss_fn: Any = None, **config: Any) -> PeftTrainer:
    """A trainer of `Number`; batch `x` has the loss `x`, and moves the weight by `-x / 10`."""
    config.setdefault("eval_every_n_steps", 1_000_000)
    trainer = PeftTrainer(Number(), optax.sgd(0.1), TrainingConfig(**config))
    trainer.with_gen_model_input_fn(lambda batch: {"x": batch})
    return trainer.with_loss_fn(loss_fn or (lambda model, x: x + (model.w[...] - 0.0) * 0.0))


def numbers(count: int, start: int = 1) -> list[np.float32]:
    """Batches that are their own number."""
    return [np.float32(number) for number in range(start, start + count)]


def decoder(*, seed: int = 0, mesh: jax.sharding.Mesh | None = None, **sizes: int) -> nnx.Module:
    """A Llama of two layers; on a mesh, split over it."""
    config = llama3.ModelConfig(
        **{
            "num_layers": 2,
            "vocab_size": VOCABULARY,
            "embed_dim": 16,
            "hidden_dim": 32,
            "num_heads": 4,
            "head_dim": 4,
            "num_kv_heads": 2,
            "rope_theta": 500,
            "norm_eps": 1e-5,
            "weight_tying": True,
            **sizes,
        }
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(seed))
    if mesh is not None:
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model


def with_lora(model: Any, *, seed: int = 1) -> nnx.Module:
    """The decoder with adapters of rank 2."""
    import qwix

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return qwix.apply_lora_to_model(
            model,
            qwix.LoraProvider(module_path=".*q_proj|.*v_proj|.*up_proj", rank=2, alpha=4.0),
            **model.get_model_input(),
            rngs=nnx.Rngs(seed),
        )


def decoder_trainer(model: nnx.Module | None = None, **config: Any) -> PeftTrainer:
    """A trainer of the decoder with the default loss and a schedule that is logged."""
    config.setdefault("eval_every_n_steps", 1_000_000)
    optimizer = optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 10)
    )
    return PeftTrainer(model or decoder(), optimizer, TrainingConfig(**config))


def token_batches(
    count: int, *, batch: int = BATCH, seed: int = 0, uneven: bool = True
) -> Iterator[TrainingInput]:
    """Seeded batches; uneven ones have padding of very different length."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(1, VOCABULARY, (batch, LENGTH), np.int32)
        mask = np.ones_like(tokens, bool)
        if uneven:
            for row in mask:
                row[rng.integers(2, LENGTH) :] = False
        yield TrainingInput(input_tokens=tokens, input_mask=mask)


def losses(trainer: PeftTrainer, mode: str = "train") -> list[float]:
    """Loss of each update or evaluation."""
    if not trainer.metrics_logger.metric_exists("", "loss", mode):
        return []
    return trainer.metrics_logger.get_metric_history("", "loss", mode).tolist()


def weights(trainer: PeftTrainer) -> list[np.ndarray]:
    """Copies of all weights."""
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(trainer.model, nnx.Param))]


def joined(batches: Sequence[TrainingInput]) -> TrainingInput:
    """One batch of all their rows."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


class Recorded(TrainingHooks):
    """Hooks that note their calls; `fails_at` names the update whose end raises."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at = fails_at
        self.error = error

    def on_train_start(self, train_ctx: PeftTrainer) -> None:
        self.calls.append(("train_start",))

    def on_train_end(self, train_ctx: PeftTrainer) -> None:
        self.calls.append(("train_end",))

    def on_train_step_start(self, train_ctx: PeftTrainer) -> None:
        self.calls.append(("step_start", train_ctx.iter_steps))

    def on_train_step_end(self, train_ctx: PeftTrainer, train_step: int, train_loss: float) -> None:
        self.calls.append(("step_end", train_step, train_loss))
        if train_step == self.fails_at and self.error is not None:
            raise self.error

    def on_eval_step_start(self, train_ctx: PeftTrainer) -> None:
        self.calls.append(("eval_start",))

    def on_eval_step_end(self, train_ctx: PeftTrainer, eval_loss: float) -> None:
        self.calls.append(("eval_end", eval_loss))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]
