# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The default loss, and what a loss function may return."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Outcome(NamedTuple):
    """What a loss function said of one micro-batch.

    Attributes:
        loss: A mean over something, such as tokens.
        weight: Over how many; 1 where the loss function does not say.
        aux: What else it returned.
    """

    loss: jax.Array
    weight: jax.Array
    aux: Any


def outcome(returned: Any, *, has_aux: bool) -> Outcome:
    """Reads what a loss function returned.

    Args:
        returned: `loss` or `(loss, denominator)`; with `has_aux`, either of them and aux:
            `(loss, aux)` or `((loss, denominator), aux)`.
        has_aux: Whether there is aux.

    Raises:
        TypeError: It is something else.
    """
    aux = None
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"with has_aux=True the loss function returns (loss, aux), got {_kind(returned)}"
            )
        returned, aux = returned
    weight: Any = 1.0
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise TypeError(
                f"a loss function returns loss or (loss, denominator), got {len(returned)} values"
            )
        returned, weight = returned
    loss = jnp.asarray(returned)
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    for name, value in (("loss", loss), ("denominator", weight)):
        if value.shape != ():
            raise TypeError(
                f"the {name} of a loss function is a scalar, got an array of shape {value.shape}: "
                "return its mean, or give has_aux=True if the second value is no denominator"
            )
    return Outcome(loss, weight, aux)


def as_outcome(returned: Any) -> Outcome:
    """Reads what an evaluation step returned: an `Outcome`, `(loss, aux)` or a loss."""
    if isinstance(returned, Outcome):
        return returned
    loss, aux = returned if isinstance(returned, tuple) else (returned, None)
    return Outcome(jnp.asarray(loss), jnp.ones(()), aux)


def default_loss_fn(
    model: nnx.Module,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of each next token, averaged over those that `input_mask` marks.

    Args:
        model: Returns `(logits, cache)`, logits of shape [batch, length, vocabulary].
        input_tokens: [batch, length].
        input_mask: [batch, length], true where a token counts as a target.
        positions: [batch, length].
        attention_mask: [batch, length, length].

    Returns:
        Mean in nats and number of tokens, so that micro-batches weigh as many tokens as they have.
    """
    logits, _ = model(input_tokens, positions, None, attention_mask)  # pyright: ignore[reportCallIssue]
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), input_tokens[:, 1:]
    )
    counts = input_mask[:, 1:].astype(jnp.float32)
    tokens = jnp.sum(counts)
    return jnp.sum(each * counts) / jnp.maximum(tokens, 1.0), tokens


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
