# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Toy decoders with the weights of `toy_llama`, on disk and in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy_llama
from safetensors.numpy import save_file


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """What transformers computes, see `make_golden.py`."""
    return json.loads(Path(__file__).with_name("golden.json").read_text("utf-8"))


@pytest.fixture
def toy_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes the toy's tensors, with changes: a name to another array, or to None for none."""

    def write(changes: dict[str, np.ndarray | None] | None = None, *, tied: bool = False) -> Path:
        tensors = toy_llama.tensors(tied=tied) | (changes or {})
        folder = tmp_path / "toy"
        folder.mkdir()
        kept = {name: value for name, value in tensors.items() if value is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """Four devices, two by two."""
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
