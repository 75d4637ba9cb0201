# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What the installed distribution of tunix-core says about itself and brings along."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

try:
    CORE = metadata.distribution("tunix-core")
except metadata.PackageNotFoundError:
    pytest.skip("tunix-core is not installed as a distribution", allow_module_level=True)

NEEDED = [Requirement(text) for text in CORE.requires or () if "extra ==" not in text]


def test_no_back_end_of_metrics_is_required() -> None:
    """Neither of the old ones nor their common layer, not even as an extra."""
    named = {Requirement(text).name.lower() for text in CORE.requires or ()}
    assert named
    assert not named & {"metrax", "tensorboard", "tensorboardx", "wandb", "clu", "mlflow"}


def test_only_the_api_of_opentelemetry_is_required() -> None:
    """SDK, exporters and instrumentation belong to the application."""
    ours = [r for r in NEEDED if r.name.startswith("opentelemetry")]
    assert [r.name for r in ours] == ["opentelemetry-api"]
    assert ours[0].specifier.contains("1.25.0")
    assert not ours[0].specifier.contains("1.24.0")


def test_no_requirement_is_closed_above() -> None:
    """A library that caps what others share cannot be installed beside its users."""
    assert {s.operator for r in NEEDED for s in r.specifier} <= {">="}


def test_version_and_license_agree_with_the_package() -> None:
    """One version, and the license of every file's header."""
    import tunix

    assert CORE.version == tunix.__version__
    fields = CORE.metadata
    assert "Apache-2.0" in (fields["License-Expression"] or fields["License"] or "")


def test_source_imports_no_back_end() -> None:
    """What is not required is not imported either; of OpenTelemetry the API only."""
    import tunix

    banned = re.compile(
        r"^\s*(?:from|import) +(?:metrax|tensorboard\w*|wandb|clu|opentelemetry\.(?:sdk|exporter"
        r"|instrumentation))\b",
        re.MULTILINE,
    )
    files = list(Path(str(tunix.__file__)).parent.rglob("*.py"))
    assert len(files) > 10
    assert not [file for file in files if banned.search(file.read_text("utf-8"))]
