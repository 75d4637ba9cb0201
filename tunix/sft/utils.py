# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a decoder, and what a model has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def make_causal_attn_mask(input_mask: jax.Array) -> jax.Array:
    """Returns which token may look at which: itself and what is left of it, padding never.

    Args:
        input_mask: [batch, length], true where there is a token.

    Returns:
        [batch, length, length] of bool: rows look at columns.

    Raises:
        ValueError: `input_mask` has not two dimensions.
    """
    if input_mask.ndim != 2:
        raise ValueError(f"input_mask needs the shape [batch, length], got {input_mask.shape}")
    length = input_mask.shape[-1]
    return jnp.tril(jnp.ones((length, length), bool)) & input_mask.astype(bool)[:, None, :]


def build_positions_from_mask(input_mask: jax.Array) -> jax.Array:
    """Returns the position of each token, counted from 0 without padding.

    Args:
        input_mask: [..., length], true where there is a token.

    Returns:
        int32 of the same shape; padding has the position of the token before it, or 0.
    """
    return jnp.maximum(jnp.cumsum(input_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def is_lora_enabled(model: nnx.Module) -> bool:
    """Whether the model has LoRA parameters, which are then all that is trained."""
    return any(isinstance(node, nnx.LoRAParam) for _, node in nnx.iter_graph(model))
