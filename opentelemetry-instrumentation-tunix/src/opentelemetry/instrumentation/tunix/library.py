# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Which Tunix is here: decided by the files that `import tunix` would run, importing nothing.

`google-tunix` and `tunix-core` own the same package name, and the metadata of one may stand beside
the files of the other (a checkout on the path shadows an installed release), so metadata alone
would lie.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import pathlib
import sys
from typing import Final, NamedTuple

from . import package

# The underscore is how every instrumentation spells it.
_TUNIX: Final = package._instruments_any  # pyright: ignore[reportPrivateUsage]


class Library(NamedTuple):
    """A distribution that owns the `tunix` package that is, or would be, imported."""

    name: str
    version: str
    requirement: str


def detect() -> Library | None:
    """Finds the distribution whose files `import tunix` runs.

    Returns:
        The library, or None where no `tunix` is found or where it belongs to no distribution we
        know (a source checkout on the path): the caller then goes by features alone.
    """
    found = _find()
    if found is None:
        return None
    requirement, distribution = found
    return Library(requirement.split()[0], distribution.version, requirement)


def required() -> tuple[str, ...]:
    """What a programmatic `instrument()` has to find installed.

    `BaseInstrumentor` asks for every item, so this names the one library that is here; both where
    there is none (so that the refusal names them), and nothing for a source checkout without
    metadata, which is instrumented by feature.
    """
    found = _find()
    if found is not None:
        return (found[0],)
    return _TUNIX if _origin() is None else ()


def _find() -> tuple[str, importlib.metadata.Distribution] | None:
    """The requirement and the distribution that own the package; reads no version."""
    origin = _origin()
    if origin is None:
        return None
    for requirement in _TUNIX:
        try:
            distribution = importlib.metadata.distribution(requirement.split()[0])
        except importlib.metadata.PackageNotFoundError:
            continue
        if _owns(distribution, origin):
            return requirement, distribution
    return None


def _origin() -> str | None:
    """The file that is, or would be, `tunix/__init__.py`; importing nothing."""
    module = sys.modules.get("tunix")
    file = getattr(module, "__file__", None)
    if file is None:
        # PathFinder rather than importlib.util.find_spec: a post-import hook finder in
        # sys.meta_path has no part in this question.
        spec = importlib.machinery.PathFinder.find_spec("tunix")
        file = None if spec is None else spec.origin
    return None if file is None else os.path.realpath(file)


def _owns(distribution: importlib.metadata.Distribution, origin: str) -> bool:
    located = distribution.locate_file("tunix/__init__.py")
    if os.path.realpath(os.fspath(str(located))) == origin:
        return True
    # An editable install records a path file instead of the package's files.
    root = os.path.dirname(os.path.dirname(origin))
    for file in distribution.files or ():
        # Read leniently: a record may list what is gone, and a .pth may be in any encoding.
        path = pathlib.Path(os.fspath(str(distribution.locate_file(file))))
        if path.suffix == ".pth" and path.is_file():
            lines = path.read_bytes().decode("utf-8", "replace").splitlines()
            if root in lines:
                return True
    return False
