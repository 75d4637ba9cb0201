# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Receivers for both OTLP protocols, and processes that export to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The one place where the integration tests learn where `otlp_receiver` and `receivers` are.
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "examples")]

from receivers import GrpcReceiver, ScriptResult, otlp_environment, run_script  # noqa: E402

from otlp_receiver import HttpReceiver, Receiver  # noqa: E402

if TYPE_CHECKING:
    RunScript = Callable[..., ScriptResult]

RECEIVERS: Mapping[str, type[Receiver]] = {"http": HttpReceiver, "grpc": GrpcReceiver}


@pytest.fixture
def http_receiver() -> Iterator[HttpReceiver]:
    """An OTLP/HTTP receiver that serves during the test."""
    with HttpReceiver() as receiver:
        yield receiver


@pytest.fixture(params=RECEIVERS)
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    """A receiver that serves during the test: once OTLP/HTTP, once OTLP/gRPC."""
    with RECEIVERS[request.param]() as receiver:
        yield receiver


@pytest.fixture
def http_env(http_receiver: HttpReceiver) -> dict[str, str]:
    """The environment that points a process at `http_receiver`."""
    return otlp_environment(http_receiver)


@pytest.fixture
def otlp_env(receiver: Receiver) -> dict[str, str]:
    """The environment that points a process at `receiver`."""
    return otlp_environment(receiver)


@pytest.fixture(name="run_script")
def run_script_fixture(tmp_path: Path) -> RunScript:
    """`receivers.run_script` in a fresh folder outside the checkout."""
    return partial(run_script, cwd=tmp_path)
