# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of `tunix.models`."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest

# Before JAX is imported: a CPU backend of four devices, so that weights can be split.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
sys.path.append(str(pathlib.Path(__file__).with_name("llama3")))  # toy_llama

_SPEC = importlib.util.find_spec("tunix")
if (
    not _SPEC
    or not pathlib.Path(str(_SPEC.origin)).with_name("models").joinpath("_sharding.py").exists()
):  # an environment that tests google-tunix
    collect_ignore_glob = ["*test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Lets pass what qwix warns about: it calls what later releases of flax deprecate."""
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:(flax|qwix)\.")
