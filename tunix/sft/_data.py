# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Batches on their way from a data set to a loss function."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from tunix.sft import utils
from tunix.sft._training_config import TrainingInput

_log = logging.getLogger(__name__)
_END = object()


def after(batches: Iterator[Any], done: int) -> Iterator[Any]:
    """Returns the batches that follow the first `done`.

    Raises:
        ValueError: There is no batch at all.
    """
    first = next(batches, _END)
    if first is _END:
        raise ValueError("train_ds has no batch: there is nothing to train on")
    if not done:
        return itertools.chain([first], batches)
    _log.info("Skipping %d micro-batches that were trained on before.", done)
    skipped = 1 + sum(1 for _ in itertools.islice(batches, done - 1))
    if skipped < done:
        _log.warning(
            "train_ds ends within the %d micro-batches that were trained on before: nothing of it "
            "is left to train on.",
            done,
        )
    return batches


def repeatable(batches: Iterable[Any]) -> Iterable[Any]:
    """Returns what can be gone through again: an iterator gives its batches only once."""
    return list(batches) if isinstance(batches, Iterator) else batches


def default_model_input(batch: Any) -> Any:
    """Returns the arguments of the default loss function of a `TrainingInput`.

    Raises:
        ValueError: It has images.
    """
    if not isinstance(batch, TrainingInput):
        return batch
    if batch.images is not None:
        raise ValueError("images are not supported: TrainingInput.images must be None")
    mask = jnp.asarray(batch.input_mask)
    return {
        "input_tokens": jnp.asarray(batch.input_tokens),
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }
