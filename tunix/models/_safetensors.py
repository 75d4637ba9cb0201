# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of safetensors files in the layout of the Hugging Face hub, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  Makes numpy know bfloat16, which safetensors asks it for.
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Shape = tuple[int, ...]

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_NAMED = 5  # Problems an error spells out: a wrong configuration differs in every tensor.


class Checkpoint:
    """The tensors of a folder; opening it reads the headers of its files and no data.

    Its files are those of `model.safetensors.index.json`, else `model.safetensors`, else all
    `*.safetensors`.

    Args:
        folder: The folder.

    Attributes:
        folder: The folder.
        shapes: Shape of each tensor, by name.

    Raises:
        FileNotFoundError: The folder, or a file of it, is missing.
        ValueError: A file is damaged, or two files hold tensors of one name.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        for path in _find_files(self.folder):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118  It is no mapping.
                if name in self.shapes:
                    raise ValueError(
                        f"{self.folder} holds {name} twice, the second time in {path.name}: keep "
                        "the files of one checkpoint only."
                    )
                header = file.get_slice(name)
                self.shapes[name] = tuple(header.get_shape())
                self._dtypes[name] = header.get_dtype()
                self._files[name] = file

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, in memory of its own."""
        return self._files[name].get_tensor(name)

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Makes sure that the folder holds these tensors, of these shapes, and no others.

        Raises:
            ValueError: It does not. The message names tensors, both shapes and the remedy.
        """
        problems = [
            f"{name} is missing, the configuration asks for {expected[name]}"
            if name not in self.shapes
            else f"{name} has shape {self.shapes[name]}, the configuration asks for "
            f"{expected.get(name, 'no such tensor')}"
            for name in sorted({*self.shapes, *expected})
            if self.shapes.get(name) != expected.get(name)
        ]
        if problems:
            rest = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            raise ValueError(
                f"The weights in {self.folder} are not those of the configuration: "
                f"{'; '.join(problems[:_NAMED])}{rest}. Choose the ModelConfig of this "
                "checkpoint, or download the checkpoint of this configuration."
            )
        for name, dtype in self._dtypes.items():
            if dtype not in _FLOATS:
                raise ValueError(
                    f"{name} in {self.folder} has dtype {dtype}: quantised weights are not "
                    "supported. Download the checkpoint with floating-point weights."
                )


def write(
    folder: str | Path,
    shapes: Mapping[str, tuple[Shape, np.dtype]],
    read: Callable[[str], np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Writes tensors into one file, or into several with an index where one would be too large.

    Never more than one file is held in memory. The index comes last: a folder whose writing broke
    off is not taken for a complete one.

    Args:
        folder: Made if it does not exist.
        shapes: Shape and dtype of each tensor, by name.
        read: Returns the tensor of a name.
        max_shard_bytes: Size of a file, except that each holds at least one tensor.

    Raises:
        FileExistsError: The folder has weights already.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    old = next(folder.glob("*.safetensors*"), None)
    if old is not None:
        raise FileExistsError(f"{old} exists already: delete it, or write to another folder.")
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    shards = _split(sizes, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = (
            _ONE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        weight_map |= dict.fromkeys(names, file)
        tensors = {name: np.ascontiguousarray(read(name)) for name in names}
        # transformers refuses files that do not say which framework's layout they have.
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        folder.joinpath(_INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Groups names, in order, so that the sizes of a group add up to `limit` at most."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _find_files(folder: Path) -> Sequence[Path]:
    """Returns the files that make up the checkpoint in a folder."""
    remedy = (
        "Give the local folder of a downloaded checkpoint, for example one made by "
        "huggingface_hub.snapshot_download."
    )
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"{folder} {what}. {remedy}")
    index = folder / _INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is damaged ({error!r}): download it again.") from error
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {', '.join(missing)}, which {_INDEX} names: download them."
            )
        return [folder / file for file in files]
    if (folder / _ONE_FILE).is_file():
        return [folder / _ONE_FILE]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file. {remedy}")
    return paths


def _open(path: Path) -> Any:
    with contextlib.suppress(SafetensorError):
        return safe_open(path, framework="numpy")
    raise ValueError(f"{path} is no complete safetensors file: download it again.")
