# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is in them, what can be restored, and what a resumed run does."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from small_runs import (
    Number,
    decoder,
    decoder_trainer,
    losses,
    number_trainer,
    numbers,
    token_batches,
    weights,
    with_lora,
)

from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

EVERY = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=None)


def saving(folder: Any, every: int = 1) -> dict[str, Any]:
    return {
        "checkpoint_root_directory": str(folder),
        "checkpointing_options": ocp.CheckpointManagerOptions(
            save_interval_steps=every, max_to_keep=None
        ),
    }


def steps_in(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def size_of(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# The manager -----------------------------------------------------------------------------------


def test_without_a_folder_it_does_nothing() -> None:
    manager = CheckpointManager()
    assert manager.save(1, Number()) is False
    assert manager.maybe_restore(Number()) == (0, {})
    assert manager.latest_step() is None
    manager.close()


def test_what_was_saved_is_restored_with_its_metadata(tmp_path: pathlib.Path) -> None:
    manager = CheckpointManager(str(tmp_path), EVERY)
    model = decoder(seed=3)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.step.set_raw_value(jnp.uint32(9))
    assert manager.save(4, model, optimizer, custom_metadata={"global_step": 2})
    assert manager.latest_step() == 4
    other = decoder(seed=5)
    its = nnx.Optimizer(other, optax.adam(1e-3), wrt=nnx.Param)
    assert manager.maybe_restore(other, its) == (4, {"global_step": 2})
    for a, b in zip(
        jax.tree.leaves((nnx.state(model), nnx.state(optimizer))),
        jax.tree.leaves((nnx.state(other), nnx.state(its))),
        strict=True,
    ):
        assert np.array_equal(a, b)
    manager.close()
    manager.close()


def test_a_step_is_saved_when_the_options_say_so_or_when_forced(tmp_path: pathlib.Path) -> None:
    options = ocp.CheckpointManagerOptions(save_interval_steps=10)
    manager = CheckpointManager(str(tmp_path), options)
    assert manager.save(10, Number())
    assert not manager.save(11, Number())
    assert manager.save(12, Number(), force=True)
    manager.close()
    assert steps_in(tmp_path) == [10, 12]


def test_a_chosen_step_is_restored_and_one_that_is_not_there_is_named(
    tmp_path: pathlib.Path,
) -> None:
    manager = CheckpointManager(str(tmp_path), EVERY)
    model = Number()
    for step in (1, 2, 3):
        model.w[...] = jnp.float32(step)
        manager.save(step, model)
    assert manager.maybe_restore(model, step=2)[0] == 2
    assert float(model.w[...]) == 2
    with pytest.raises(ValueError, match=r"no checkpoint of step 7; it has \[1, 2, 3\]"):
        manager.maybe_restore(model, step=7)
    manager.close()


def test_a_random_key_is_saved_and_restored(tmp_path: pathlib.Path) -> None:
    class Drawing(Number):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    manager = CheckpointManager(str(tmp_path), EVERY)
    model, other = Drawing(1), Drawing(2)
    model.dropout(jnp.ones(8))
    manager.save(1, model)
    manager.maybe_restore(other)
    assert np.array_equal(model.dropout(jnp.ones(64)), other.dropout(jnp.ones(64)))
    manager.close()


def test_weights_come_back_where_they_are(tmp_path: pathlib.Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tp"))
    manager = CheckpointManager(str(tmp_path), EVERY)
    whole, split = decoder(seed=1), decoder(seed=2, mesh=mesh)
    manager.save(1, whole)
    places = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(split))]
    manager.maybe_restore(split)
    found = jax.tree.leaves(nnx.state(split))
    assert [leaf.sharding for leaf in found] == places
    assert all(
        np.array_equal(a, b) for a, b in zip(found, jax.tree.leaves(nnx.state(whole)), strict=True)
    )
    manager.close()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"embed_dim": 24},
            r"another model: model_params 'embedder\.input_embedding' is \(32, 16\) there and "
            r"\(32, 24\) here",
        ),
        ({"num_layers": 1}, r"'layers\.1\..*' is \(.*\) there and missing here"),
        ({"num_layers": 3}, r"'layers\.2\..*' is missing there and \(.*\) here"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_weight_that_differs(
    tmp_path: pathlib.Path, sizes: dict[str, int], message: str
) -> None:
    manager = CheckpointManager(str(tmp_path), EVERY)
    manager.save(1, decoder())
    with pytest.raises(ValueError, match=message):
        manager.maybe_restore(decoder(**sizes))
    manager.close()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: pathlib.Path) -> None:
    manager = CheckpointManager(str(tmp_path), EVERY)
    model = Number()
    manager.save(1, model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    with pytest.raises(ValueError, match="another model: optimizer_state 'opt_state"):
        manager.maybe_restore(model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param))
    manager.close()


def test_an_optimizer_that_was_not_saved_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    manager = CheckpointManager(str(tmp_path), EVERY)
    model = Number()
    manager.save(1, model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.step.set_raw_value(jnp.uint32(9))
    assert manager.maybe_restore(model, optimizer)[0] == 1
    assert int(optimizer.step[...]) == 9
    manager.close()


# Trainers --------------------------------------------------------------------------------------


def test_a_run_saves_its_last_step_whatever_the_interval(tmp_path: pathlib.Path) -> None:
    number_trainer(**saving(tmp_path, every=2)).train(numbers(5))
    assert steps_in(tmp_path) == [1, 2, 4, 5]  # Orbax saves the first that it is offered


def test_a_trainer_that_did_nothing_saves_nothing(tmp_path: pathlib.Path) -> None:
    number_trainer(max_steps=0, **saving(tmp_path)).train(numbers(5))
    assert steps_in(tmp_path) == []


def test_a_closed_trainer_with_checkpoints_says_what_to_do(tmp_path: pathlib.Path) -> None:
    trainer = number_trainer(**saving(tmp_path))
    trainer.train(numbers(1))
    with pytest.raises(RuntimeError, match="closed and cannot save any more: make another"):
        trainer.train(numbers(1))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    tmp_path: pathlib.Path, lora: bool, accumulation: int
) -> None:
    def made(folder: str, limit: int) -> PeftTrainer:
        model = with_lora(decoder()) if lora else decoder()
        return decoder_trainer(
            model,
            max_steps=limit,
            gradient_accumulation_steps=accumulation,
            **saving(tmp_path / folder),
        )

    batches = list(token_batches(8 * accumulation))
    straight = made("straight", 8)
    straight.train(batches)
    first = made("broken", 4)
    first.train(batches)
    second = made("broken", 8)
    assert (second.train_steps, second.iter_steps) == (4, 4 * accumulation)
    second.train(batches)
    assert losses(first) + losses(second) == losses(straight)
    assert all(
        np.array_equal(a, b) for a, b in zip(weights(second), weights(straight), strict=True)
    )
    assert second.train_steps == 8
    assert steps_in(tmp_path / "broken") == list(range(1, 9))


def test_micro_batches_that_were_trained_on_are_skipped_and_nothing_else(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = number_trainer(gradient_accumulation_steps=2, **saving(tmp_path))
    first.train(numbers(5))  # the fifth is half an update, which no checkpoint holds
    second = number_trainer(gradient_accumulation_steps=2, **saving(tmp_path))
    second.train(numbers(8))
    assert losses(second) == [5.5, 7.5]
    third = number_trainer(gradient_accumulation_steps=2, **saving(tmp_path))
    with caplog.at_level(logging.WARNING):
        third.train(numbers(3))
    assert losses(third) == []
    assert "train_ds ends within the 8 micro-batches" in caplog.text


def test_an_external_manager_has_nothing_skipped(tmp_path: pathlib.Path) -> None:
    number_trainer(**saving(tmp_path)).train(numbers(3))
    resumed = number_trainer(**saving(tmp_path))
    resumed.is_managed_externally = True
    resumed.train(numbers(2, start=9))
    resumed.close()
    assert losses(resumed) == [9, 10]
    assert resumed.train_steps == 5


def test_a_subclass_finds_its_metadata_again(tmp_path: pathlib.Path) -> None:
    class Counting(PeftTrainer):
        def custom_checkpoint_metadata(self) -> dict[str, Any]:
            return {"global_step": 10 * self.train_steps}

    def made() -> Counting:
        config = TrainingConfig(eval_every_n_steps=9, **saving(tmp_path))
        trainer = Counting(Number(), optax.sgd(0.1), config)
        trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(lambda model, x: x)
        return trainer

    made().train(numbers(3))
    assert made()._restored_custom_metadata == {"global_step": 30}


def test_adapters_alone_are_saved_and_a_run_of_the_other_kind_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    sizes = {"embed_dim": 128, "hidden_dim": 512, "vocab_size": 2048}
    decoder_trainer(decoder(**sizes), **saving(tmp_path / "full")).train(list(token_batches(1)))
    lora = decoder_trainer(with_lora(decoder(**sizes)), **saving(tmp_path / "lora"))
    lora.train(list(token_batches(1)))
    assert size_of(tmp_path / "lora") < 0.05 * size_of(tmp_path / "full")
    with pytest.raises(ValueError, match="holds LoRA adapters alone, and this model has none"):
        decoder_trainer(decoder(**sizes), **saving(tmp_path / "lora"))
    with pytest.raises(ValueError, match="holds all weights, and this model trains LoRA"):
        decoder_trainer(with_lora(decoder(**sizes)), **saving(tmp_path / "full"))
    with pytest.raises(ValueError, match="is of another model"):
        decoder_trainer(decoder(), **saving(tmp_path / "full"))


RUN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import small_runs as runs
import orbax.checkpoint as ocp
folder, kill_after = sys.argv[1], int(sys.argv[2])
hooks = runs.Recorded()
trainer = runs.decoder_trainer(
    runs.with_lora(runs.decoder()), max_steps=10, checkpoint_root_directory=folder,
    checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=None),
)
def batches():
    for number, batch in enumerate(runs.token_batches(10), start=1):
        if number == kill_after + 1:
            while (trainer.checkpoint_manager.latest_step() or 0) < kill_after:
                pass
            trainer.checkpoint_manager._manager.wait_until_finished()
            trainer._write_metrics(leave=0)
            print("losses", trainer.train_steps, *map(float.hex, runs.losses(trainer)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
trainer.train(batches())
print("losses", trainer.train_steps, *map(float.hex, runs.losses(trainer)), flush=True)
"""


def run(folder: pathlib.Path, kill_after: int) -> tuple[int, list[str]]:
    code = RUN.format(tests=str(pathlib.Path(__file__).parent))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder), str(kill_after)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line.split() for line in found.stdout.splitlines() if line.startswith("losses")]
    assert lines, found.stderr
    return found.returncode, lines[-1][1:]


def test_a_killed_run_resumes_with_the_losses_that_it_would_have_had(
    tmp_path: pathlib.Path,
) -> None:
    code, straight = run(tmp_path / "straight", 99)
    assert code == 0
    code, first = run(tmp_path / "killed", 5)
    assert code == -signal.SIGKILL
    code, second = run(tmp_path / "killed", 99)
    assert code == 0
    assert first[0] == "5"
    assert first[1:] + second[1:] == straight[1:]
    assert second[0] == straight[0] == "10"
    assert steps_in(tmp_path / "killed") == list(range(1, 11))
