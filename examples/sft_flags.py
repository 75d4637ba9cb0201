# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Command line of `sft_smollm2.py`: every value is checked before any work starts."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from reasoning_gym.factory import DATASETS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# `composite` mixes other families and means nothing without a configuration.
FAMILIES = sorted(DATASETS.keys() - {"composite"})
DEFAULT_TASKS = "count_bits,lcm,simple_equations"
CHECKPOINT_EVERY = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """What the user asked for; see `parse` for what each flag means."""

    steps: int
    batch: int
    length: int
    tasks: list[str]
    questions: int
    rank: int
    alpha: float
    learning_rate: float
    accumulation: int
    eval_every: int
    checkpoint_dir: str | None
    checkpoint_every: int
    seed: int
    cache_dir: str | None


def parse(arguments: Sequence[str]) -> Flags:
    """Reads the command line.

    A bad value ends the process with exit code 2 and a message that names the value and the remedy.
    """
    parser = argparse.ArgumentParser(
        prog="sft_smollm2.py",
        description="LoRA fine-tuning of SmolLM2-135M on generated questions.",
    )

    def add(flag: str, kind: Callable[[str], object], default: object, text: str) -> None:
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: %(default)s)")

    add("--steps", _whole_number(1), 20, "updates of the weights")
    add("--batch", _whole_number(1), 4, "examples in a micro-batch")
    add("--accumulation", _whole_number(1), 1, "micro-batches averaged in one update")
    add("--length", _whole_number(2), 64, "tokens an example may have")
    add("--tasks", _families, DEFAULT_TASKS, "families of reasoning-gym, separated by commas")
    add("--questions", _whole_number(1), 512, "questions generated for training")
    add("--rank", _whole_number(1), 8, "rank of the LoRA adapters")
    add("--alpha", _positive_number, 16.0, "scale of the LoRA adapters")
    add("--learning-rate", _positive_number, 1e-3, "learning rate of AdamW")
    add("--eval-every", _whole_number(0), 0, "updates between evaluations, 0 for none")
    add("--seed", _whole_number(0, 2**32 - 1), 0, "seed of questions, order and adapters")
    parser.add_argument(
        "--checkpoint-dir", help="folder of checkpoints; resumes from what it holds"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_whole_number(1),
        help=f"updates between checkpoints (default: {CHECKPOINT_EVERY})",
    )
    parser.add_argument("--cache-dir", help="folder of the converted model, see smollm2.py")
    found = parser.parse_args(arguments)
    if found.checkpoint_every and not found.checkpoint_dir:
        parser.error(
            f"--checkpoint-every {found.checkpoint_every} has no effect without --checkpoint-dir: "
            "add that flag or drop this one"
        )
    if found.checkpoint_dir:
        try:
            found.checkpoint_dir = _writable(found.checkpoint_dir)
        except OSError as error:
            parser.error(f"--checkpoint-dir: {error}; name a folder that can be written to")
    found.checkpoint_every = found.checkpoint_every or CHECKPOINT_EVERY
    return Flags(**vars(found))


def _whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    wanted = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"

    def parse_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < minimum or (maximum is not None and number > maximum):
            raise argparse.ArgumentTypeError(f"got {text!r}, give a whole number, {wanted}")
        return number

    return parse_number


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, give a number above 0")
    return number


def _families(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAMILIES:
            nearest = difflib.get_close_matches(name, FAMILIES, cutoff=0.4) or FAMILIES
            raise argparse.ArgumentTypeError(
                f"unknown family {name!r}, nearest: {', '.join(nearest)}"
            )
    return names


def _writable(text: str) -> str:
    """Returns the absolute folder, created if need be, after writing into it once."""
    if "://" in text:
        return text  # A storage bucket: its own library checks it.
    folder = Path(text).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return str(folder)
