# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""How arrays are laid out over the axes of a device mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Axis = str | tuple[str, ...] | None
"""Mesh axes that one dimension of an array is split over; None leaves it whole."""


def join(*axes: Axis) -> Axis:
    """Returns the axes of a dimension that is several dimensions flattened into one."""
    names: tuple[str, ...] = ()
    for entry in axes:
        names += (entry,) if isinstance(entry, str) else entry or ()
    return names if len(names) > 1 else next(iter(names), None)


def fit(axes: Sequence[Axis], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the layout that is as close to `axes` as the mesh and the shape allow.

    A dimension stays whole where the mesh has no such axis, or where its size is not a multiple
    of the number of parts, which JAX refuses: 9 heads on 2 devices, or a batch of one.

    Args:
        axes: The wanted axes, one entry a dimension.
        shape: Size of each dimension.
        mesh: The mesh.
    """

    def usable(wanted: Axis, size: int) -> Axis:
        names = (wanted,) if isinstance(wanted, str) else wanted or ()
        names = tuple(name for name in names if name in mesh.shape)
        parts = math.prod(mesh.shape[name] for name in names)
        return None if size % parts else join(names)

    return PartitionSpec(*(usable(*pair) for pair in zip(axes, shape, strict=True)))


def constrain(x: jax.Array, axes: Sequence[Axis]) -> jax.Array:
    """Lays an activation out over the mesh of `jax.set_mesh`; without one, returns it as it is.

    Meshes whose axes are not all automatic are left alone too: there the caller, not the compiler,
    decides about layouts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind is not AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, fit(axes, x.shape, mesh))


def named_sharding(axes: Sequence[Axis], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Returns the layout of one weight.

    Raises:
        ValueError: The mesh has axes that are not automatic.
    """
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"The model needs a mesh with automatic axes, got {mesh}. Make it with "
            "jax.sharding.Mesh(devices, axis_names), or give jax.make_mesh "
            "axis_types=(jax.sharding.AxisType.Auto,) * number_of_axes."
        )
    return NamedSharding(mesh, fit(axes, shape, mesh))
