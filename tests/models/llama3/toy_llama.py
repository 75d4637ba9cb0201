# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Small decoders whose weights anybody can make again, for tests and for `make_golden.py`."""

from __future__ import annotations

import numpy as np

SIZES = {
    "num_layers": 2,
    "vocab_size": 48,
    "embed_dim": 24,
    "hidden_dim": 40,
    "num_heads": 6,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 500,
    "norm_eps": 1e-5,
}
"""Heads are wider than the stream divided by their number: no two sizes can be confused."""

SCALING = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context": 64,
}
"""Of the frequencies that the sizes give, some stay, some are mixed, and some become slow."""


def tensors(*, tied: bool) -> dict[str, np.ndarray]:
    """Weights by the names of Hugging Face, drawn with a fixed seed, float32."""
    s = SIZES
    q, kv = s["num_heads"] * s["head_dim"], s["num_kv_heads"] * s["head_dim"]
    embed, hidden = s["embed_dim"], s["hidden_dim"]
    shapes = {"model.embed_tokens.weight": (s["vocab_size"], embed), "model.norm.weight": (embed,)}
    for layer in range(s["num_layers"]):
        for name, shape in {
            "input_layernorm": (embed,),
            "self_attn.q_proj": (q, embed),
            "self_attn.k_proj": (kv, embed),
            "self_attn.v_proj": (kv, embed),
            "self_attn.o_proj": (embed, q),
            "post_attention_layernorm": (embed,),
            "mlp.gate_proj": (hidden, embed),
            "mlp.up_proj": (hidden, embed),
            "mlp.down_proj": (embed, hidden),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    if not tied:
        shapes["lm_head.weight"] = (s["vocab_size"], embed)
    generator = np.random.default_rng(7)
    return {
        name: generator.normal(len(shape) == 1, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def tokens(length: int, rows: int = 1) -> np.ndarray:
    """Token ids of shape [rows, length], int32."""
    return np.random.default_rng(11).integers(0, SIZES["vocab_size"], (rows, length), np.int32)
