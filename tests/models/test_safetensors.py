# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of safetensors files: which files count, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tunix.models._safetensors import Checkpoint, write

ONE = np.ones((1,), np.float32)


def save(folder: Path, file: str, *names: str) -> None:
    save_file(dict.fromkeys(names, ONE), folder / file)


def save_index(folder: Path, **files: str) -> None:
    index = {"weight_map": files}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def test_files_of_the_index_count_and_no_others(tmp_path):
    save(tmp_path, "a.safetensors", "a")
    save(tmp_path, "b.safetensors", "b")
    save(tmp_path, "consolidated.safetensors", "a")
    save_index(tmp_path, a="a.safetensors", b="b.safetensors")

    assert Checkpoint(tmp_path).shapes == {"a": (1,), "b": (1,)}


def test_model_file_counts_before_others(tmp_path):
    save(tmp_path, "consolidated.safetensors", "other")
    save(tmp_path, "model.safetensors", "a")

    assert list(Checkpoint(tmp_path).shapes) == ["a"]


def test_files_without_an_index_count_together(tmp_path):
    save(tmp_path, "x.safetensors", "a")
    save(tmp_path, "y.safetensors", "b")

    assert set(Checkpoint(str(tmp_path)).shapes) == {"a", "b"}


def test_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path, "model.safetensors", "a")

    assert Checkpoint("~").folder == tmp_path


def test_tensor_in_two_files_is_named(tmp_path):
    save(tmp_path, "x.safetensors", "a")
    save(tmp_path, "y.safetensors", "a")
    with pytest.raises(ValueError, match=r"holds a twice, the second time in y\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere does not exist. Give the local folder"),
        ("file", "file is a file, not a folder. Give the local folder"),
        ("empty", r"empty holds no \*.safetensors file. Give the local folder"),
    ],
)
def test_place_without_weights_is_named_with_the_remedy(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint(tmp_path / name)


def test_file_that_the_index_names_in_vain_is_named(tmp_path):
    save(tmp_path, "a.safetensors", "a")
    save_index(tmp_path, a="a.safetensors", b="b.safetensors", c="c.safetensors")
    with pytest.raises(FileNotFoundError, match=r"lacks b\.safetensors, c\.safetensors, which"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 1}'])
def test_damaged_index_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is damaged .*: download it again"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_file_that_is_cut_off_is_named(tmp_path, kept):
    path = tmp_path / "model.safetensors"
    save(tmp_path, path.name, "a", "b")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is no complete safetensors file"):
        Checkpoint(tmp_path)


def test_writing_that_breaks_off_leaves_no_complete_checkpoint(tmp_path):
    def read(name: str) -> np.ndarray:
        if name == "b":
            raise KeyboardInterrupt
        return ONE

    shapes = dict.fromkeys("abc", ((1,), np.dtype(np.float32)))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, shapes, read, max_shard_bytes=4)

    with pytest.raises(ValueError, match="b is missing"):
        Checkpoint(tmp_path).check(dict.fromkeys("abc", (1,)))


@pytest.mark.parametrize(
    ("limit", "files"), [(100, 1), (12, 1), (11, 2), (8, 2), (7, 3), (4, 3), (1, 3)]
)
def test_files_are_as_large_as_allowed(tmp_path, limit, files):
    shapes = dict.fromkeys("abc", ((1,), np.dtype(np.float32)))
    write(tmp_path, shapes, lambda name: ONE, limit)

    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert Checkpoint(tmp_path).shapes == dict.fromkeys("abc", (1,))
