# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The distribution says the same in its metadata, its module and its version."""

from __future__ import annotations

from importlib import metadata

import pytest
from opentelemetry.instrumentation import tunix
from opentelemetry.instrumentation.tunix import TunixInstrumentor, package
from packaging.requirements import Requirement

DISTRIBUTION = "opentelemetry-instrumentation-tunix"


@pytest.mark.parametrize(
    ("extra", "declared"),
    [("instruments", package._instruments), ("instruments-any", package._instruments_any)],
)
def test_extras_equal_package_py(extra: str, declared: tuple[str, ...]) -> None:
    """The loader reads the extras, programmatic use reads package.py."""
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    of_extra = {
        f"{r.name}{r.specifier}"
        for r in requirements
        if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})
    }
    assert of_extra == {f"{r.name}{r.specifier}" for r in map(Requirement, declared)}


def test_entry_point_loads_the_instrumentor() -> None:
    """Distros find the class under the name tunix and construct it without arguments."""
    (entry_point,) = metadata.entry_points(group="opentelemetry_instrumentor", name="tunix")
    assert entry_point.load() is TunixInstrumentor
    assert entry_point.load()() is TunixInstrumentor()


def test_version_is_that_of_the_distribution() -> None:
    """One version, in version.py."""
    assert metadata.version(DISTRIBUTION) == tunix.__version__


def test_run_time_needs_no_sdk_and_no_exporter() -> None:
    """Providers and exporters are the application's business."""
    needed = {
        Requirement(text).name
        for text in metadata.requires(DISTRIBUTION) or ()
        if "extra" not in text
    }
    assert needed == {
        "opentelemetry-api",
        "opentelemetry-instrumentation",
        "opentelemetry-semantic-conventions",
        "wrapt",
    }
