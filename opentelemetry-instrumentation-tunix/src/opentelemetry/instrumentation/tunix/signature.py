# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What decides whether a jitted function is compiled again: structure, shapes and dtypes."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

Signature: TypeAlias = dict[str, str]
"""Path within a batch to dtype and shape."""


def signature_of(batch: Any) -> Signature:
    """Describes every leaf of a batch, as "int32[4,16]"; reads no array."""
    tree_util = sys.modules["jax"].tree_util
    leaves, _ = tree_util.tree_flatten_with_path(batch)
    return {tree_util.keystr(path).lstrip("."): _described(leaf) for path, leaf in leaves}


def changes(before: Signature, after: Signature) -> list[str]:
    """What differs, as "input_tokens: int32[4,16] -> int32[4,32]"."""
    paths = dict.fromkeys((*before, *after))
    return [
        f"{path}: {before.get(path, 'nothing')} -> {after.get(path, 'nothing')}"
        for path in paths
        if before.get(path) != after.get(path)
    ]


def _described(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]"
