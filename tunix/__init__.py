# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""tunix-core: a lean post-training core on JAX whose metrics speak OpenTelemetry."""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

__version__ = "0.1.0"

__all__ = ["MetricsLogger", "MetricsLoggerOptions", "__version__"]

# Public names and the module that defines each. They are imported on first use: JAX reads its
# environment when it is imported, and a process that only asks for the version needs none of it.
_MODULES = {
    "MetricsLogger": "tunix.sft.metrics_logger",
    "MetricsLoggerOptions": "tunix.sft.metrics_logger",
}


def _refuse_mixture(package: pathlib.Path) -> None:
    """Raises ImportError when google-tunix was installed into this very folder.

    Both distributions own the package name `tunix`; whichever is installed second overwrites files
    of the first, and what is imported then is neither. What an installer put where is written in
    the RECORD next to the package. A google-tunix in another folder is not the one imported.
    """
    for record in package.parent.glob("google_tunix-*.dist-info/RECORD"):
        if f"\n{package.name}/__init__.py," in "\n" + record.read_text("utf-8"):
            raise ImportError(
                f"tunix-core and google-tunix are both installed in {package.parent} and have "
                f"overwritten each other's files, because both own the package `{package.name}`. "
                "Keep one: `pip uninstall -y google-tunix tunix-core`, then `pip install "
                "tunix-core` or `pip install google-tunix`."
            )


_refuse_mixture(pathlib.Path(__file__).resolve().parent)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
