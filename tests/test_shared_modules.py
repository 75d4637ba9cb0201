# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The modules that both distributions carry are the same."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "tunix" / "sft"
INSTRUMENTOR = ROOT.joinpath(
    "opentelemetry-instrumentation-tunix", "src", "opentelemetry", "instrumentation", "tunix"
)
SHARED = ("_emitter", "_gauges", "_instruments", "_process", "_scalars", "_series")

if not INSTRUMENTOR.is_dir():
    pytest.skip("compares two folders of the repository", allow_module_level=True)


@pytest.mark.parametrize("name", SHARED)
def test_copies_are_equal(name: str) -> None:
    """A change of one copy is a change of both: neither distribution depends on the other."""
    core, instrumentor = (folder / f"{name}.py" for folder in (CORE, INSTRUMENTOR))
    assert core.read_bytes() == instrumentor.read_bytes()


def test_each_copied_module_is_compared() -> None:
    """A module that says it exists twice stands in the list above."""
    claim = "This module exists twice, byte for byte"
    assert sorted(p.stem for p in CORE.glob("*.py") if claim in p.read_text()) == list(SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_shared_module_imports_what_both_have(name: str) -> None:
    """The API, NumPy, the standard library and each other: not `tunix`, and JAX not at import."""
    tree = ast.parse(CORE.joinpath(f"{name}.py").read_text("utf-8"))
    absolute = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            absolute |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                assert (module or node.names[0].name) in SHARED
            else:
                absolute.add(module.partition(".")[0])
    assert absolute <= {"numpy", "opentelemetry", *sys.stdlib_module_names}
