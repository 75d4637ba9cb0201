# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of `tunix.generate`."""

from __future__ import annotations

import importlib.util
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

_SPEC = importlib.util.find_spec("tunix")
if (
    not _SPEC
    or not pathlib.Path(str(_SPEC.origin)).with_name("sft").joinpath("_gauges.py").exists()
):  # an environment that tests google-tunix
    collect_ignore_glob = ["test_*.py"]
