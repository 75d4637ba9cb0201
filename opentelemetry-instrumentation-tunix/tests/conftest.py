# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the instrumentor's tests: explicit in-memory providers, no globals."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from in_memory import Collected
from opentelemetry.instrumentation.tunix import TunixInstrumentor, library, telemetry

# Tests run on the CPU unless told otherwise, and wherever they run.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps "warnings are errors" to our own code where Tunix is somebody else's."""
    expected = os.environ.get("TUNIX_UNDER_TEST")
    found = library.detect()
    if expected is not None and (found is None or f"{found.name}=={found.version}" != expected):
        raise pytest.UsageError(f"this environment is to test {expected}, but has {found}")
    if found is not None and found.name == "google-tunix":
        # A library of somebody else's on libraries newer than it knows warns a great deal.
        for line in ("default", r"error:::opentelemetry\.instrumentation\.tunix", "error:::test_"):
            config.addinivalue_line("filterwarnings", line)


@pytest.fixture
def collected() -> Iterator[Collected]:
    """Providers of the test's own; nothing is instrumented yet."""
    collected = Collected()
    yield collected
    collected.shutdown()


@pytest.fixture
def instrumented(collected: Collected) -> Iterator[Collected]:
    """Tunix instrumented with those providers until the test ends."""
    instrumentor = TunixInstrumentor()
    instrumentor.instrument(**collected.providers())
    yield collected
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


@pytest.fixture(autouse=True)
def forget_reported_failures() -> None:
    """Lets each test see the warning that is given once a process."""
    telemetry._reported.clear()
