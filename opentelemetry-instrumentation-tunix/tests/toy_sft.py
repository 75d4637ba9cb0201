# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning in a second: the toy transformer that google-tunix ships for its tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

BATCH, LENGTH = 4, 16


class Run:
    """A trainer on the toy transformer with everything that tests vary.

    Attributes:
        trainer: The `PeftTrainer`.
        losses: Training loss of each update, as the library logged it.
    """

    def __init__(
        self,
        *,
        updates: int | None,
        accumulation: int | None = None,
        eval_every: int = 1000,
        checkpoints: str | None = None,
        save_every: int = 1,
        loss_fn: Any = None,
        optimizer: Any = None,
    ) -> None:
        # Imported here: tests decide what happens before `import tunix`.
        from tunix.sft import peft_trainer
        from tunix.tests import test_common

        self.model = test_common.ToyTransformer(
            test_common.ModelConfig(num_layers=1), rngs=nnx.Rngs(0)
        )
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=eval_every,
            max_steps=updates,
            gradient_accumulation_steps=accumulation,
            checkpoint_root_directory=checkpoints,
            checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=save_every),
        )
        if optimizer is None:
            optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
        self.trainer = peft_trainer.PeftTrainer(self.model, optimizer, config)
        self.trainer.with_gen_model_input_fn(
            lambda batch: {
                "input_tokens": batch.input_tokens,
                "input_mask": batch.input_mask,
                "positions": jax.numpy.arange(LENGTH)[None],
                "attention_mask": jax.numpy.ones((LENGTH, LENGTH), bool),
            }
        )
        if loss_fn is not None:
            self.trainer.with_loss_fn(loss_fn)

    def train(self, train_ds: Any, eval_ds: Any = None, **kwargs: Any) -> None:
        """Trains to the end of the data or of `updates`."""
        self.trainer.train(train_ds, eval_ds, **kwargs)

    @property
    def losses(self) -> list[float]:
        """Loss of each update."""
        history = self.trainer.metrics_logger.get_metric_history("", "loss", "train")
        return [float(value) for value in history]

    def parameters(self) -> list[np.ndarray[Any, Any]]:
        """Copies of all parameters, in tree order."""
        return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(self.model, nnx.Param))]


def batches(count: int, *, length: int = LENGTH, seed: int = 0) -> Iterator[Any]:
    """`count` seeded random batches of `BATCH` sequences of `length` tokens."""
    from tunix.sft import peft_trainer

    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(1, 256, size=(BATCH, length), dtype=np.int32)
        yield peft_trainer.TrainingInput(
            input_tokens=tokens, input_mask=np.ones_like(tokens, dtype=bool)
        )


def eval_batches(count: int = 2) -> list[Any]:
    """A list of batches, so that every evaluation sees them all."""
    return list(batches(count, seed=1))
