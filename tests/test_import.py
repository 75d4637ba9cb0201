# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""`import tunix`: what it costs, what it offers, when it refuses."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SPEC = importlib.util.find_spec("tunix")
if SPEC is None or not Path(str(SPEC.origin)).with_name("sft").joinpath("_gauges.py").exists():
    pytest.skip("tests of tunix-core, which is not installed here", allow_module_level=True)
PACKAGE = Path(str(SPEC.origin)).parent
ROOT = Path(__file__).resolve().parents[1]


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code isolated from the environment, with `path` in front of sys.path."""
    prologue = f"import sys; sys.path[:0] = {[str(p) for p in path or (PACKAGE.parent,)]}\n"
    return subprocess.run(
        [sys.executable, "-I", "-c", prologue + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def installed(folder: Path, *, record: str | None) -> Path:
    """A folder with a copy of the package and, with `record`, google-tunix's list of files."""
    shutil.copytree(PACKAGE, folder / "tunix", ignore=shutil.ignore_patterns("__pycache__"))
    if record is not None:
        info = folder / "google_tunix-0.1.7.dist-info"
        info.mkdir()
        info.joinpath("RECORD").write_text(record, "utf-8")
    return folder


def test_import_is_cheap() -> None:
    """JAX reads its environment when it is imported: not before something is used that needs it."""
    heavy = ("jax", "numpy", "opentelemetry", "tqdm", "importlib.metadata")
    result = python(f"import tunix; print([m for m in {heavy} if m in sys.modules])")
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_logger_does_not_import_jax() -> None:
    """Whoever logs an array has imported JAX; a process without arrays need not."""
    code = "from tunix.sft import metrics_logger; print('jax' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_public_names_are_there() -> None:
    """Each name of `__all__` can be had from the package and is listed by `dir`."""
    import tunix

    assert tunix.__all__
    assert all(getattr(tunix, name) is not None for name in tunix.__all__)
    assert set(tunix.__all__) <= set(dir(tunix))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tunix.nothing  # noqa: B018


def test_version_is_that_of_the_distribution() -> None:
    """`__version__` is written down so that the import need not read any metadata."""
    import tunix

    project = ROOT / "pyproject.toml"
    if project.exists():
        assert tunix.__version__ == tomllib.loads(project.read_text("utf-8"))["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", tunix.__version__)


def test_mixture_of_both_distributions_is_refused(tmp_path: Path) -> None:
    """google-tunix in the same folder: the import names the folder and the two ways out."""
    folder = installed(tmp_path, record="tunix/__init__.py,sha256=x,1\ntunix/oss/a.py,,\n")
    result = python("import tunix", folder)
    assert result.returncode == 1
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: tunix-core and google-tunix are both installed in")
    assert str(folder) in message
    assert "pip install tunix-core" in message
    assert "pip install google-tunix" in message


@pytest.mark.parametrize("record", [None, "", "__editable__.google_tunix-0.1.7.pth,sha256=x,1\n"])
def test_google_tunix_elsewhere_is_no_mixture(tmp_path: Path, record: str | None) -> None:
    """Metadata whose files are in another folder does not matter: these files are whole."""
    result = python("import tunix; print(tunix.__file__)", installed(tmp_path, record=record))
    assert (Path(result.stdout.strip()), result.stderr) == (tmp_path / "tunix/__init__.py", "")


def test_checkout_in_front_of_an_installed_google_tunix_is_no_mixture(tmp_path: Path) -> None:
    """The release in site-packages is shadowed as a whole."""
    other = installed(tmp_path, record="tunix/__init__.py,sha256=x,1\n")
    result = python("import tunix; print(tunix.__file__)", PACKAGE.parent, other)
    assert (Path(result.stdout.strip()).parent, result.stderr) == (PACKAGE, "")
