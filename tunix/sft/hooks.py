# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a training loop calls of the application's."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix.sft.peft_trainer import PeftTrainer


class TrainingHooks(abc.ABC):
    """Called around training, each micro-batch and each evaluation batch."""

    @abc.abstractmethod
    def on_train_start(self, train_ctx: PeftTrainer) -> None:
        """Before the first batch is asked for."""

    @abc.abstractmethod
    def on_train_end(self, train_ctx: PeftTrainer) -> None:
        """After the last update, before the trainer closes."""

    @abc.abstractmethod
    def on_train_step_start(self, train_ctx: PeftTrainer) -> None:
        """Before each micro-batch."""

    @abc.abstractmethod
    def on_train_step_end(self, train_ctx: PeftTrainer, train_step: int, train_loss: float) -> None:
        """After each update, once its loss is known and logged.

        The device is one update ahead by then, so that it does not have to wait.

        Args:
            train_ctx: The trainer.
            train_step: The update, from 1.
            train_loss: Its loss.
        """

    @abc.abstractmethod
    def on_eval_step_start(self, train_ctx: PeftTrainer) -> None:
        """Before each evaluation batch."""

    @abc.abstractmethod
    def on_eval_step_end(self, train_ctx: PeftTrainer, eval_loss: float) -> None:
        """After each evaluation.

        Args:
            train_ctx: The trainer.
            eval_loss: The mean over its batches, weighted like the loss.
        """


class DataHooks(abc.ABC):
    """Gives the batches in place of the data sets that `train` gets."""

    @abc.abstractmethod
    def load_next_train_batch(self, train_ctx: PeftTrainer) -> Any:
        """Returns the next batch, or None at the end."""

    @abc.abstractmethod
    def load_next_eval_batch(self, train_ctx: PeftTrainer) -> Any:
        """Returns the next batch of an evaluation, or None at its end."""
