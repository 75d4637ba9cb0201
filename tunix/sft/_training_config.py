# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a training run is told, and what it trains on."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import flax.struct
import jax
import numpy as np
import orbax.checkpoint as ocp

from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.profiler import ProfilerOptions


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainingConfig:
    """How a `PeftTrainer` trains.

    Attributes:
        eval_every_n_steps: Updates between evaluations.
        max_steps: Updates after which training ends; None trains to the end of the data.
        gradient_accumulation_steps: Micro-batches of an update; None is one.
        checkpoint_root_directory: Where checkpoints are; None makes none.
        checkpointing_options: When checkpoints are written and kept, in Orbax's terms.
        metrics_logging_options: Of the logger that the trainer makes where it is given none.
        profiler_options: A window of steps for JAX's profiler.
        perf_metrics_options: Of the performance tracer.
        data_sharding_axis: Mesh axes that the dimensions of a batch are split over, in order.
        max_inflight_computations: Micro-batches that the host runs ahead of the device.
        metrics_prefix: In front of what is logged, such as "actor".
        pbar_description: In front of the progress bar.
        max_seq_token_per_tpu: Sequence packing, which is not supported: None.
    """

    eval_every_n_steps: int
    max_steps: int | None = None
    gradient_accumulation_steps: int | None = None
    checkpoint_root_directory: str | None = None
    checkpointing_options: ocp.CheckpointManagerOptions | None = None
    metrics_logging_options: MetricsLoggerOptions | None = None
    profiler_options: ProfilerOptions | None = None
    perf_metrics_options: Any = None
    data_sharding_axis: tuple[str, ...] = ("fsdp",)
    max_inflight_computations: int = 2
    metrics_prefix: str = ""
    pbar_description: str | None = "Training"
    max_seq_token_per_tpu: int | None = None

    def __post_init__(self) -> None:
        """See `check`."""
        self.check()

    def check(self) -> None:
        """Makes sure that one can train like this.

        Raises:
            ValueError: A value is out of its range, or names what is not supported.
            TypeError: A number is no integer.
        """
        _at_least(1, "eval_every_n_steps", self.eval_every_n_steps)
        _at_least(0, "max_steps", self.max_steps, optional=True)
        _at_least(1, "gradient_accumulation_steps", self.gradient_accumulation_steps, optional=True)
        _at_least(1, "max_inflight_computations", self.max_inflight_computations)
        if isinstance(self.data_sharding_axis, str):
            axis = self.data_sharding_axis
            raise TypeError(
                f"data_sharding_axis must be a tuple of axis names, got {axis!r}: write ({axis!r},)"
            )
        if self.max_seq_token_per_tpu is not None:
            raise ValueError(
                f"max_seq_token_per_tpu must be None, got {self.max_seq_token_per_tpu}: sequence "
                "packing is not supported"
            )

    def get_with_default(self, key: str, default: Any) -> Any:
        """Returns the value of a field, or `default` where it is None."""
        value = getattr(self, key)
        return default if value is None else value


def _at_least(least: int, name: str, value: Any, *, optional: bool = False) -> None:
    if value is None:
        if optional:
            return
        raise TypeError(f"{name} must be an integer, got None")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}")


@flax.struct.dataclass(frozen=True)
class TrainingInput:
    """One batch of tokens.

    Attributes:
        input_tokens: [batch, length] of int.
        input_mask: [batch, length], true where a token is there and counts.
        images: Not supported: None.
    """

    input_tokens: jax.Array | np.ndarray
    input_mask: jax.Array | np.ndarray
    images: jax.Array | np.ndarray | None = None
