# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What an update gave, kept until the device has computed it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tunix.sft._steps import StepOutput


@dataclasses.dataclass(slots=True, kw_only=True)
class MetricsBuffer:
    """What is known of an update before it is logged.

    Attributes:
        step: The update, from 1.
        losses: Its loss; arrays that the device may still compute.
        additional_metrics: Name to values and how they become one.
    """

    step: int
    losses: list[Any]
    additional_metrics: dict[str, tuple[list[Any], Callable[[Any], Any]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def loss(self) -> np.floating:
        """Mean of the losses; waits for the device."""
        return np.mean([np.asarray(loss) for loss in self.losses])


def buffer_of(found: StepOutput, step: int) -> MetricsBuffer:
    """The metrics of an update."""
    metrics: dict[str, tuple[list[Any], Callable[[Any], Any]]] = {
        "grad_norm": ([found.grad_norm], np.mean)
    }
    if found.learning_rate is not None:
        metrics["learning_rate"] = ([found.learning_rate], np.mean)
    return MetricsBuffer(step=step, losses=[found.loss], additional_metrics=metrics)


def values_of(buffer: MetricsBuffer) -> dict[str, Any]:
    """The numbers of an update by name, loss first; waits for the device."""
    return {
        **loss_values(float(buffer.loss)),
        **{
            name: combine([np.asarray(value) for value in found])
            for name, (found, combine) in buffer.additional_metrics.items()
        },
    }


def loss_values(loss: float) -> dict[str, Any]:
    """A loss in nats, and its perplexity: infinite where float64 cannot hold it."""
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    return {"loss": loss, "perplexity": perplexity}


def weighted_mean(losses: list[tuple[Any, Any]]) -> float:
    """Mean of (mean, denominator) pairs in float64; NaN over nothing."""
    means, weights = (np.array([float(x) for x in column]) for column in zip(*losses, strict=True))
    counts = weights > 0
    if not counts.any():
        return math.nan
    return float(np.average(means[counts], weights=weights[counts]))
