# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The Llama decoder: RMSNorm, rotary grouped-query attention and SwiGLU around one residual stream.

Shapes in this module: B batch, T tokens of the call, S tokens that attention sees (T, or the size
of the cache), D `embed_dim`, V `vocab_size`, K `num_kv_heads`, H `head_dim`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models._sharding import Axis, constrain, join
from tunix.models.llama3._config import ModelConfig, RematConfig, RopeScaling, ShardingConfig

__all__ = ["Cache", "Llama3", "ModelConfig", "RematConfig", "RopeScaling", "ShardingConfig"]

LayerCache = dict[str, jax.Array]
"""`k` and `v` of shape [B, S, K, H], and `end_index` of shape [B]: how many tokens they hold."""

Cache = dict[str, LayerCache]
"""`layer_<index>` to the cache of that layer."""

Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of each rotary angle, each [B, T, 1, H / 2], float32."""


_NORMAL = nnx.initializers.normal(0.02)


class RMSNorm(nnx.Module):
    """Scales vectors to a root mean square of one, then by a learned weight a channel.

    The statistics are float32, whatever the input is (https://arxiv.org/abs/1910.07467).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None) -> None:
        axes = config.shd_config.rms_norm_weight
        self.scale = _weight((config.embed_dim,), axes, rngs, nnx.initializers.ones)
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the input's shape and dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...]).astype(x.dtype)


class Linear(nnx.Module):
    """A projection of the last dimension."""

    def __init__(
        self, inputs: int, outputs: int, axes: tuple[Axis, ...], rngs: nnx.Rngs | None
    ) -> None:
        self.kernel = _weight((inputs, outputs), axes, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., inputs] to [..., outputs], in the dtype of the input."""
        # This very function, because qwix replaces it to add LoRA or to quantise.
        kernel = self.kernel[...].astype(x.dtype)
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class Embedder(nnx.Module):
    """The table of token embeddings, and its transpose as output projection where tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None) -> None:
        shape = (config.vocab_size, config.embed_dim)
        self.input_embedding = _weight(shape, config.shd_config.emb_vd, rngs)

    def encode(self, tokens: jax.Array) -> jax.Array:
        """Looks tokens [B, T] up; returns [B, T, D]."""
        return self.input_embedding[...][tokens]

    def decode(self, x: jax.Array) -> jax.Array:
        """Projects [B, T, D] onto the vocabulary; returns logits [B, T, V]."""
        return x @ self.input_embedding[...].T


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding (https://arxiv.org/abs/2305.13245)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None) -> None:
        self.config = config
        layout = config.shd_config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_axes = (layout.q_weight_dnh[0], join(*layout.q_weight_dnh[1:]))
        kv_axes = (layout.kv_weight_dnh[0], join(*layout.kv_weight_dnh[1:]))
        o_axes = (join(*layout.o_weight_nhd[:2]), layout.o_weight_nhd[2])
        self.q_proj = Linear(config.embed_dim, q, q_axes, rngs)
        self.k_proj = Linear(config.embed_dim, kv, kv_axes, rngs)
        self.v_proj = Linear(config.embed_dim, kv, kv_axes, rngs)
        self.o_proj = Linear(q, config.embed_dim, o_axes, rngs)

    def __call__(
        self, x: jax.Array, rotation: Rotation, cache: LayerCache | None, mask: jax.Array
    ) -> tuple[jax.Array, LayerCache | None]:
        """Mixes what tokens know of each other.

        Args:
            x: [B, T, D].
            rotation: Rotary angles of the T tokens.
            cache: Keys and values of earlier tokens.
            mask: [B, T, S], true where a token may look.

        Returns:
            An array of shape [B, T, D], and the cache with the T tokens appended.
        """
        query = _rotate(self._heads(self.q_proj(x)), rotation)
        key = _rotate(self._heads(self.k_proj(x)), rotation)
        value = self._heads(self.v_proj(x))
        if cache is not None:
            cache = _append(cache, key, value)
            key, value = cache["k"].astype(x.dtype), cache["v"].astype(x.dtype)
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), cache

    def _heads(self, x: jax.Array) -> jax.Array:
        """Splits the last dimension into heads."""
        heads = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return constrain(heads, self.config.shd_config.act_btnh)


class MLP(nnx.Module):
    """The SwiGLU feed-forward block (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None) -> None:
        self.layout = config.shd_config
        inward = (config.embed_dim, config.hidden_dim, self.layout.ffw_weight_df)
        self.gate_proj = Linear(*inward, rngs)
        self.up_proj = Linear(*inward, rngs)
        self.down_proj = Linear(
            config.hidden_dim, config.embed_dim, self.layout.ffw_weight_fd, rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D], each token by itself."""
        hidden = jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(constrain(hidden, self.layout.act_btf))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None) -> None:
        self.config = config
        self.input_layernorm = RMSNorm(config, rngs)
        self.attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: jax.Array, rotation: Rotation, cache: LayerCache | None, mask: jax.Array
    ) -> tuple[jax.Array, LayerCache | None]:
        """Arguments and results are those of `Attention`."""
        call = _caller(self.config, RematConfig.BLOCK)
        mixed, cache = call(self.attn, self.input_layernorm(x), rotation, cache, mask)
        x = x + mixed
        x = x + call(self.mlp, self.post_attention_layernorm(x))
        return constrain(x, self.config.shd_config.act_btd), cache


class Llama3(nnx.Module):
    """A decoder of the Llama family with random weights; see `params` for pretrained ones.

    Args:
        config: Figures of the model.
        rngs: Its stream `params` draws the weights, which are float32. None makes a model with
            shapes in place of weights, for those who fill it with others.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None) -> None:
        self.config = config
        # Weights carry the names of their mesh axes, for whoever places them. Flax would look for
        # a mesh now, and refuse to make a weight where there is none.
        with nnx.use_eager_sharding(False):
            self.embedder = Embedder(config, rngs)
            self.layers = nnx.List([DecoderLayer(config, rngs) for _ in range(config.num_layers)])
            self.final_norm = RMSNorm(config, rngs)
            if not config.weight_tying:
                self.lm_head = Linear(
                    config.embed_dim, config.vocab_size, config.shd_config.emb_dv, rngs
                )

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        attention_mask: jax.Array,
    ) -> tuple[jax.Array, Cache | None]:
        """Predicts the next token at every position.

        Args:
            input_tokens: [B, T], integers.
            positions: [B, T], position of each token in its text.
            cache: Keys and values of earlier tokens, or None. The T tokens of all rows are written
                behind what the first row holds; the cache must have room for them.
            attention_mask: [B, T, S], true where a token may look: S is T without a cache, else
                the size of the cache.

        Returns:
            Logits [B, T, V] in the dtype of the weights, and the new cache, None if there was none.

        Raises:
            ValueError: The call has more tokens than the cache has places.
        """
        new_cache: Cache | None = None if cache is None else {}
        rotation = _rotation(positions, self.config)
        x = constrain(self.embedder.encode(input_tokens), self.config.shd_config.act_btd)
        call = _caller(self.config, RematConfig.DECODER)
        for index, layer in enumerate(self.layers):
            name = f"layer_{index}"
            layer_cache = None if cache is None else cache[name]
            x, layer_cache = call(layer, x, rotation, layer_cache, attention_mask)
            if new_cache is not None:
                new_cache[name] = layer_cache
        x = self.final_norm(x)
        logits = self.embedder.decode(x) if self.config.weight_tying else self.lm_head(x)
        return logits, new_cache

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any = jnp.float32) -> Cache:
        """Returns an empty cache.

        Args:
            batch_size: Rows.
            cache_size: Places for tokens in each row.
            dtype: Of keys and values.
        """
        config = self.config
        shape = (batch_size, cache_size, config.num_kv_heads, config.head_dim)

        def empty() -> jax.Array:
            return constrain(jnp.zeros(shape, dtype), config.shd_config.act_btnh)

        # Arrays of their own for each layer: a sampler may donate them.
        return {
            f"layer_{index}": {
                "k": empty(),
                "v": empty(),
                "end_index": jnp.zeros((batch_size,), jnp.int32),
            }
            for index in range(config.num_layers)
        }

    def get_model_input(self) -> dict[str, Any]:
        """Returns arguments of a small call, for tools that trace the model such as qwix."""
        tokens = jnp.ones((1, 8), jnp.int32)
        return {
            "input_tokens": tokens,
            "positions": tokens,
            "cache": None,
            "attention_mask": jnp.ones((1, 1, 8), jnp.bool_),
        }


def _weight(
    shape: tuple[int, ...],
    axes: tuple[Axis, ...],
    rngs: nnx.Rngs | None,
    init: nnx.Initializer = _NORMAL,
) -> nnx.Param:
    """Makes a float32 weight, or its shape only, that carries the names of its mesh axes."""
    value: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    if rngs is not None:
        value = init(rngs.params(), shape, jnp.float32)
    # Flax has had several names for the metadata; this function knows the right one.
    return nnx.Param(nnx.with_partitioning(lambda: value, axes)())


def _caller(config: ModelConfig, level: RematConfig) -> Callable[..., Any]:
    """Returns what calls a module, and forgets its inside until the backward pass if so configured.

    The module is an argument: `nnx.remat` must see the weights that it closes over.
    """
    # A number instead of the member is how command lines and YAML files hand it over.
    return _remat_call if RematConfig(config.remat_config) is level else _call


def _call(module: Callable[..., Any], *args: Any) -> Any:
    return module(*args)


_remat_call = nnx.remat(_call)


def _rotation(positions: jax.Array, config: ModelConfig) -> Rotation:
    """Angles of the rotary embedding (https://arxiv.org/abs/2104.09864), the same in all layers."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if scaling := config.rope_scaling:
        turns = scaling.original_context * frequency / (2 * math.pi)
        band = scaling.high_freq_factor - scaling.low_freq_factor
        kept = jnp.clip((turns - scaling.low_freq_factor) / band, 0.0, 1.0)
        frequency *= kept + (1.0 - kept) / scaling.factor
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns pairs made of the first and the second half of each head, [B, T, heads, H]."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _append(cache: LayerCache, key: jax.Array, value: jax.Array) -> LayerCache:
    """Writes keys and values [B, T, K, H] behind those that the cache holds."""
    places, tokens = cache["k"].shape[1], key.shape[1]
    if tokens > places:
        raise ValueError(
            f"The cache has {places} places, but the call has {tokens} tokens. "
            "Make it larger (cache_size), or call with fewer tokens."
        )
    start = (0, cache["end_index"][0], 0, 0)
    return {
        "k": jax.lax.dynamic_update_slice(cache["k"], key.astype(cache["k"].dtype), start),
        "v": jax.lax.dynamic_update_slice(cache["v"], value.astype(cache["v"].dtype), start),
        "end_index": cache["end_index"] + tokens,
    }
