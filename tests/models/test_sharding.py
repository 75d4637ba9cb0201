# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts: what a mesh and a shape allow of what is wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tunix.models._sharding import constrain, fit, join

MESH = AbstractMesh((2, 4), ("fsdp", "tp"))


@pytest.mark.parametrize(
    ("axes", "shape", "wanted"),
    [
        (("fsdp", "tp"), (6, 8), P("fsdp", "tp")),
        (("fsdp", None), (6, 8), P("fsdp", None)),
        (("fsdp", "tp"), (6, 6), P("fsdp", None)),
        (("fsdp", "tp"), (1, 8), P(None, "tp")),
        (("data", "tp"), (6, 8), P(None, "tp")),
        ((("fsdp", "tp"),), (16,), P(("fsdp", "tp"))),
        ((("fsdp", "tp"),), (12,), P(None)),
        ((("data", "tp"),), (8,), P("tp")),
    ],
)
def test_dimension_stays_whole_where_it_cannot_be_split(axes, shape, wanted):
    assert fit(axes, shape, MESH) == wanted


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ((None, None), None),
        (("tp", None), "tp"),
        (("a", "b"), ("a", "b")),
        ((("a", "b"), "c"), ("a", "b", "c")),
    ],
)
def test_axes_of_flattened_dimensions_are_joined(axes, wanted):
    assert join(*axes) == wanted


def test_layout_needs_an_entry_for_each_dimension():
    with pytest.raises(ValueError, match="longer"):
        fit(("fsdp",), (2, 2), MESH)


def test_without_a_mesh_an_activation_is_left_alone():
    x = jnp.ones((4, 4))

    assert constrain(x, ("fsdp", "tp")) is x


def test_with_explicit_axes_an_activation_is_left_to_the_caller():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    x = jnp.ones((4, 4))
    with jax.set_mesh(jax.sharding.Mesh(devices, ("fsdp", "tp"), axis_types=explicit)):
        assert constrain(x, ("fsdp", "tp")) is x
