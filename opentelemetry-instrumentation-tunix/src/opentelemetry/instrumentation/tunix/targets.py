# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What is wrapped: one table for every library and release.

A row whose module does not exist in a release waits for an import that never comes; a row whose
class or method is missing is announced once at INFO and its telemetry is not there. Nothing is
decided by version numbers.
"""

from __future__ import annotations

from typing import Final

from . import metrics, semconv, training
from .patching import Target

_TRAINER: Final = "tunix.sft.peft_trainer"
_LOGGER: Final = "tunix.sft.metrics_logger"
_CHECKPOINTS: Final = "tunix.sft.checkpoint_manager"

TARGETS: Final[tuple[Target, ...]] = (
    Target(_TRAINER, "PeftTrainer", "train", training.train, semconv.RUN),
    Target(
        _TRAINER,
        "PeftTrainer",
        "jit_train_and_eval_step",
        training.jit_train_and_eval_step,
        semconv.MODEL_TRAIN,
    ),
    Target(_TRAINER, "PeftTrainer", "_run_eval", training.run_eval, semconv.MODEL_EVAL),
    Target(
        _CHECKPOINTS, "CheckpointManager", "save", training.save_checkpoint, semconv.CHECKPOINT_SAVE
    ),
    Target(
        _CHECKPOINTS,
        "CheckpointManager",
        "maybe_restore",
        training.restore_checkpoint,
        semconv.CHECKPOINT_RESTORE,
    ),
    Target(_LOGGER, "MetricsLogger", "log", metrics.log, "gauges and step events"),
    Target(_LOGGER, "MetricsLogger", "close", metrics.close, "event of the last step in time"),
    # The subclasses of RLLearner that have a train of their own delegate to it.
    Target("tunix.rl.rl_learner", "RLLearner", "train", training.train_learner, semconv.RUN),
    # From 0.1.6 on; before, the agentic learner is an RLLearner.
    Target(
        "tunix.rl.agentic.agentic_rl_learner",
        "AgenticRLLearner",
        "train",
        training.train_learner,
        semconv.RUN,
    ),
)
