# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Command line of the SFT example: what it accepts, and what it says about what it refuses."""

from __future__ import annotations

import pytest

import sft_flags


def flags(*arguments):
    return sft_flags.parse(list(arguments))


def test_defaults_are_accepted():
    chosen = flags()

    assert (chosen.steps, chosen.batch, chosen.length, chosen.accumulation) == (20, 4, 64, 1)
    assert chosen.tasks == ["count_bits", "lcm", "simple_equations"]
    assert chosen.checkpoint_dir is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-3"], "argument --steps: got '-3', give a whole number, 1 or more"),
        (["--steps", "many"], "argument --steps: got 'many', give a whole number"),
        (["--batch", "0"], "argument --batch: got '0', give a whole number, 1 or more"),
        (["--accumulation", "0"], "argument --accumulation: got '0'"),
        (["--rank", "0"], "argument --rank: got '0'"),
        (["--length", "1"], "argument --length: got '1', give a whole number, 2 or more"),
        (["--questions", "0"], "argument --questions: got '0'"),
        (["--eval-every", "-1"], "argument --eval-every: got '-1', give a whole number, 0 or more"),
        (["--alpha", "0"], "argument --alpha: got '0', give a number above 0"),
        (["--learning-rate", "nan"], "argument --learning-rate: got 'nan', give a number above 0"),
        (["--learning-rate", "inf"], "argument --learning-rate: got 'inf'"),
        (["--seed", "4294967296"], "argument --seed: got '4294967296', give a whole number, 0 to"),
        (["--tasks", "chain_sums"], "unknown family 'chain_sums', nearest: chain_sum"),
        (["--tasks", "gcd,,lcm"], "unknown family ''"),
        (["--tasks", "composite"], "unknown family 'composite'"),
        (
            ["--checkpoint-every", "5"],
            "--checkpoint-every 5 has no effect without --checkpoint-dir",
        ),
        (["--checkpoint-every", "0"], "argument --checkpoint-every: got '0'"),
    ],
)
def test_bad_flag_is_named_with_its_value_and_the_remedy(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        flags(*arguments)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "deeper"])
def test_checkpoint_folder_that_is_a_file_is_refused(tmp_path, capsys, below):
    occupied = tmp_path / "file"
    occupied.write_text("")

    with pytest.raises(SystemExit):
        flags("--checkpoint-dir", str(occupied / below))

    message = capsys.readouterr().err
    assert str(occupied) in message
    assert "name a folder that can be written to" in message


def test_checkpoint_folder_that_cannot_be_written_is_refused(monkeypatch, tmp_path, capsys):
    def refuse(**_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(sft_flags.tempfile, "TemporaryFile", refuse)
    with pytest.raises(SystemExit):
        flags("--checkpoint-dir", str(tmp_path))

    assert "Permission denied" in capsys.readouterr().err


def test_checkpoint_folder_is_made_absolute_and_a_bucket_left_alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    assert flags("--checkpoint-dir", "here").checkpoint_dir == str(tmp_path / "here")
    assert flags("--checkpoint-dir", "gs://bucket/run").checkpoint_dir == "gs://bucket/run"
