# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Where batches and optimizer state lie on a device mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Path = tuple[Any, ...]


def mesh_of(model: nnx.Module) -> Mesh | None:
    """Returns the mesh that the model's weights lie on, or the active one, or None."""
    for leaf in jax.tree.leaves(nnx.state(model)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    active = jax.sharding.get_mesh()
    return active if isinstance(active, Mesh) and not active.empty else None


def check_axes(axes: Iterable[str], mesh: Mesh) -> None:
    """Makes sure that the mesh has the axes.

    Raises:
        ValueError: It lacks one.
    """
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"data_sharding_axis names {axis!r}, which the mesh has not: its axes are "
                f"{', '.join(mesh.shape)}."
            )


def shard_input(input_data: Any, data_sharding_axis: tuple[str, ...], mesh: Mesh | None) -> Any:
    """Puts a batch on the mesh: dimension i split over axis i of `data_sharding_axis`.

    What cannot be split evenly, or has too few dimensions, is there on every device whole. Arrays
    that span processes, or lie as they should, stay as they are. In a job of several processes each
    gives its own part of the batch.

    Args:
        input_data: A pytree of arrays and numbers.
        data_sharding_axis: Mesh axes.
        mesh: None leaves the batch as it is.
    """
    if mesh is None:
        return input_data
    spec = PartitionSpec(*data_sharding_axis)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        shape = np.shape(leaf)
        splits = len(shape) >= len(spec) and all(
            size % mesh.shape[axis] == 0
            for size, axis in zip(shape, data_sharding_axis, strict=False)
        )
        sharding = NamedSharding(mesh, spec if splits else PartitionSpec())
        if jax.process_count() > 1:
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, input_data)


def place_together(model: nnx.Module, optimizer: nnx.Optimizer, mesh: Mesh | None) -> None:
    """Puts everything that a step changes where the weights are.

    A moment of a weight is split like the weight; counters, and weights without a place such as new
    adapters, are on every device of the mesh. Otherwise the first step would move them, and the
    second be compiled anew.

    Args:
        model: The model; what has no place yet is moved.
        optimizer: Its optimizer; changed in place.
        mesh: None where the weights are on one device, committed to it or not.
    """
    weights: dict[Path, Any] = {
        path: node.get_raw_value()
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param)
    }
    if mesh is None:
        elsewhere = next((w.sharding for w in weights.values() if _is_committed(w)), None)
        if elsewhere is None:
            return
    else:
        elsewhere = NamedSharding(mesh, PartitionSpec())
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            _move(node, lambda leaf: leaf if _is_committed(leaf) else _put(leaf, elsewhere))
    for path, node in nnx.iter_graph(optimizer):
        if not isinstance(node, nnx.Variable):
            continue
        beside = next((weights[path[n:]] for n in range(len(path)) if path[n:] in weights), None)
        same = beside is not None and _is_committed(beside)

        def move(leaf: Any, beside: Any = beside, same: bool = same) -> Any:
            like = same and beside.shape == leaf.shape
            return _put(leaf, beside.sharding if like else elsewhere)

        _move(node, move)


def zeros_beside(weight: jax.Array, dtype: Any) -> jax.Array:
    """Zeros of the shape of a weight, where it is."""
    place = weight.sharding if _is_committed(weight) else None
    return jnp.zeros(weight.shape, dtype, device=place)


def _is_committed(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.committed


def _put(leaf: Any, sharding: Any) -> Any:
    return jax.device_put(leaf, sharding) if isinstance(leaf, jax.Array) else leaf


def _move(variable: nnx.Variable, change: Callable[[Any], Any]) -> None:
    value = variable.get_raw_value()
    moved = jax.tree.map(change, value)
    if moved is not value:
        variable.set_raw_value(moved)
