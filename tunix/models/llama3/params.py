# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the Llama decoder, from and to safetensors files with the names of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.models import _safetensors
from tunix.models._sharding import named_sharding
from tunix.models.llama3 import model as model_lib

_MODES = ("auto", "optimized", "original")
_HUGGING_FACE = {
    "embedder": "model.embed_tokens",
    "layers": "model.layers",
    "attn": "self_attn",
    "final_norm": "model.norm",
}
"""Modules that the Hugging Face library calls otherwise."""


def create_model_from_safe_tensors(
    file_dir: str | os.PathLike[str],
    config: model_lib.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = None,
    mode: str = "auto",
) -> model_lib.Llama3:
    """Loads a pretrained model.

    Everything is checked before the first weight is read. Weights are read one by one, so that the
    host needs memory for one of them beside the model.

    Args:
        file_dir: Local folder in the layout of the Hugging Face hub: `model.safetensors`, or
            several files with `model.safetensors.index.json`.
        config: Figures of the model in the folder.
        mesh: Devices to split the weights over, as `config.shd_config` says. Without one they are
            on the default device, uncommitted.
        dtype: Of the weights. Default: as they are stored.
        mode: `auto`, `optimized` or `original`. There is one way to load; the argument is accepted
            for compatibility.

    Raises:
        FileNotFoundError: The folder or one of its files is missing.
        ValueError: A tensor is missing, unexpected, of another shape or quantised; a file is
            damaged; the mesh has explicit axes; or the mode is unknown.
    """
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    graph, state = nnx.split(model_lib.Llama3(config, rngs=None))
    weights = {hugging_face_name(path): (path, w) for path, w in nnx.to_flat_state(state)}
    layouts = {
        name: mesh and named_sharding(nnx.get_partition_spec(w).get_value(), w.shape, mesh)
        for name, (_, w) in weights.items()
    }
    checkpoint = _safetensors.Checkpoint(Path(file_dir))
    _drop_redundant(checkpoint, config)
    checkpoint.check({name: _stored_shape(path, w.shape) for name, (path, w) in weights.items()})
    loaded = []
    for name, (path, weight) in weights.items():
        value = checkpoint.read(name)
        value = np.ascontiguousarray(value.T if _is_transposed(path) else value, dtype)
        loaded.append((path, weight.replace(_place(value, layouts[name]))))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def save_model_as_safe_tensors(
    model: model_lib.Llama3,
    file_dir: str | os.PathLike[str],
    *,
    lora_alpha: float | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes the weights of a model, in their dtype, so that they can be loaded again.

    Other libraries want `config.json` and the tokenizer's files in the folder too: copy those of
    the checkpoint that the model came from.

    Args:
        model: The model, on devices that this process sees all of.
        file_dir: Folder to write to; made if it does not exist.
        lora_alpha: For a model with LoRA adapters of qwix: the `alpha` that they were made with.
            They are merged into what is written; the model stays as it is.
        max_shard_bytes: Size from which the weights are divided into several files.

    Raises:
        FileExistsError: The folder has weights already.
        ValueError: The model has LoRA adapters and `lora_alpha` is not given, or it has weights
            that a Llama checkpoint does not have, such as quantised ones.
    """
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    adapters = {path: w for path, w in state.items() if isinstance(w, nnx.LoRAParam)}
    if adapters and lora_alpha is None:
        raise ValueError(
            "The model has LoRA adapters, which a plain checkpoint cannot hold: give the "
            "lora_alpha that they were made with, and they are merged into the weights."
        )
    weights = {hugging_face_name(p): (p, w) for p, w in state.items() if p not in adapters}
    plain = nnx.state(model_lib.Llama3(model.config, rngs=None))
    wanted = {hugging_face_name(path) for path, _ in nnx.to_flat_state(plain)}
    if names := weights.keys() ^ wanted:
        raise ValueError(
            f"A Llama checkpoint differs from the model in {', '.join(sorted(names)[:5])}. Write "
            "the model as it was before layers were added, removed or quantised."
        )

    def read(name: str) -> np.ndarray:
        path, weight = weights[name]
        value = np.asarray(weight.get_value())
        lora_a = adapters.get((*path[:-1], f"{path[-1]}_lora_a"))
        lora_b = adapters.get((*path[:-1], f"{path[-1]}_lora_b"))
        if lora_a is not None and lora_b is not None:
            a, b = (np.asarray(w.get_value(), np.float32) for w in (lora_a, lora_b))
            value = (value + a @ b * (lora_alpha / a.shape[-1])).astype(value.dtype)
        return value.T if _is_transposed(path) else value

    shapes = {n: (_stored_shape(p, w.shape), np.dtype(w.dtype)) for n, (p, w) in weights.items()}
    _safetensors.write(Path(file_dir), shapes, read, max_shard_bytes)


def hugging_face_name(path: Sequence[Hashable]) -> str:
    """Returns the name of a weight in a checkpoint.

    Args:
        path: Attributes and indices that lead to it from the model.
    """
    return ".".join(_HUGGING_FACE.get(str(part), str(part)) for part in path[:-1]) + ".weight"


def _is_transposed(path: Sequence[Hashable]) -> bool:
    """Projections are stored [outputs, inputs], and used [inputs, outputs]."""
    return path[-1] == "kernel"


def _stored_shape(path: Sequence[Hashable], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(reversed(shape)) if _is_transposed(path) else tuple(shape)


def _drop_redundant(checkpoint: _safetensors.Checkpoint, config: model_lib.ModelConfig) -> None:
    """Leaves out what some checkpoints hold although it follows from their other tensors."""
    shapes = checkpoint.shapes
    for name in [name for name in shapes if name.endswith("rotary_emb.inv_freq")]:
        del shapes[name]
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if config.weight_tying and head in shapes and shapes[head] == shapes.get(embedding):
        if not np.array_equal(checkpoint.read(head), checkpoint.read(embedding)):
            raise ValueError(
                f"{head} in {checkpoint.folder} differs from {embedding}, but the configuration "
                "ties the two. Use a ModelConfig with weight_tying=False."
            )
        del shapes[head]


def _place(value: np.ndarray, layout: jax.sharding.NamedSharding | None) -> jax.Array:
    """Puts an array on the devices, each of which receives its part only."""
    if layout is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, layout, lambda part: value[part])
