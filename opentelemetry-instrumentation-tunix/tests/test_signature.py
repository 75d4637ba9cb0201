# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a recompilation is explained with."""

from __future__ import annotations

import numpy as np
import toy_sft
from opentelemetry.instrumentation.tunix.signature import changes, signature_of


def test_leaves_are_described_by_path_dtype_and_shape() -> None:
    """As the library's own batches and nested containers name them."""
    (batch,) = toy_sft.batches(1)
    assert signature_of(batch) == {"input_tokens": "int32[4,16]", "input_mask": "bool[4,16]"}
    assert signature_of({"a": [np.zeros(3, np.float32), 1.0]}) == {
        "['a'][0]": "float32[3]",
        "['a'][1]": "float",
    }


def test_changes_name_the_old_and_the_new() -> None:
    """Changed, new and missing leaves; nothing where all is as before."""
    before = {"x": "int32[4,16]", "y": "int32[]", "z": "float32[2]"}
    after = {"x": "int32[4,32]", "z": "float32[2]", "w": "bool[1]"}
    assert changes(before, after) == [
        "x: int32[4,16] -> int32[4,32]",
        "y: int32[] -> nothing",
        "w: nothing -> bool[1]",
    ]
    assert changes(before, before) == []
