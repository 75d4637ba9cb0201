# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run, written by Orbax.

A checkpoint holds the model's variables by their dotted path, the optimizer's, and metadata. With
LoRA it can hold the adapters alone: the weights below them do not change.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

_log = logging.getLogger(__name__)

_MODEL = "model_params"
_OPTIMIZER = "optimizer_state"
_LORA_ONLY = "tunix.lora_only"


class CheckpointManager:
    """Saves and restores a model and its optimizer by step; without a folder it does nothing.

    Args:
        root_directory: Where the checkpoints are: a folder, or a URL that Orbax knows.
        options: When to save and what to keep; by default a checkpoint every 180 seconds at most,
            and the last three.
    """

    def __init__(
        self,
        root_directory: str | None = None,
        options: ocp.CheckpointManagerOptions | None = None,
    ) -> None:
        self._manager: ocp.CheckpointManager | None = None
        if root_directory is None:
            return
        root = str(root_directory)
        self._root = root if "://" in root else os.path.abspath(root)
        if options is None:
            policy = ocp.checkpoint_managers.ContinuousCheckpointingPolicy(
                minimum_interval_secs=180
            )
            options = ocp.CheckpointManagerOptions(save_decision_policy=policy, max_to_keep=3)
        handlers = {name: ocp.PyTreeCheckpointHandler() for name in (_MODEL, _OPTIMIZER)}
        self._manager = ocp.CheckpointManager(self._root, options=options, item_handlers=handlers)

    def latest_step(self) -> int | None:
        """The newest step that was saved, or None."""
        return None if self._manager is None else self._manager.latest_step()

    def save(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        save_only_lora_params: bool = False,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves a step where the options say that it is time.

        Arrays are copied before this returns, and written on other threads.

        Args:
            step: Updates done.
            model: Its variables are saved.
            optimizer: None saves none.
            save_only_lora_params: Whether to leave out the weights that LoRA does not train.
            force: Whether to save at any time.
            custom_metadata: What is given back by `maybe_restore`; JSON.

        Returns:
            Whether the step was saved.
        """
        manager = self._manager
        if manager is None or not (force or manager.should_save(step)):
            return False
        items = {_MODEL: ocp.args.PyTreeSave(_arrays(_saved(model, save_only_lora_params)))}
        if optimizer is not None:
            items[_OPTIMIZER] = ocp.args.PyTreeSave(_arrays(_saved_of_optimizer(optimizer)))
        return manager.save(
            step,
            args=ocp.args.Composite(**items),
            custom_metadata={**(custom_metadata or {}), _LORA_ONLY: save_only_lora_params},
            force=force,
        )

    def maybe_restore(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        step: int | None = None,
        restore_only_lora_params: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Restores a step into a model and its optimizer, where they lie; checked before.

        Args:
            model: Its variables are set.
            optimizer: None, or a checkpoint without one, restores none.
            step: None is the newest.
            restore_only_lora_params: Whether the checkpoint holds the adapters alone.

        Returns:
            The step and its metadata; 0 and {} where there is nothing to restore.

        Raises:
            ValueError: There is no such step, or it is of another model: names the first variable
                that differs, and both shapes.
        """
        manager = self._manager
        if manager is None:
            return 0, {}
        manager.wait_until_finished()  # of a step that is still being written there is nothing yet
        if step is None:
            step = manager.latest_step()
            if step is None:
                return 0, {}
        elif step not in manager.all_steps():
            there = sorted(manager.all_steps())
            raise ValueError(f"{self._root} has no checkpoint of step {step}; it has {there}")
        began = time.perf_counter()
        metadata = dict(manager.metadata(step).custom_metadata or {})
        self._check_kind(step, metadata.pop(_LORA_ONLY, None), restore_only_lora_params)
        stored = manager.item_metadata(step)
        targets = {_MODEL: _saved(model, restore_only_lora_params)}
        if optimizer is not None and stored.get(_OPTIMIZER) is not None:
            targets[_OPTIMIZER] = _saved_of_optimizer(optimizer)
        items = {}
        for name, variables in targets.items():
            arrays = _arrays(variables)
            self._check(step, name, stored[name], arrays)
            items[name] = ocp.args.PyTreeRestore(
                item=arrays, restore_args=ocp.checkpoint_utils.construct_restore_args(arrays)
            )
        restored = manager.restore(step, args=ocp.args.Composite(**items))
        for name, variables in targets.items():
            _set(variables, restored[name])
        _log.info("Restored step %d in %.1f s.", step, time.perf_counter() - began)
        return step, metadata

    def close(self) -> None:
        """Waits until everything is written. May be called twice."""
        if self._manager is not None:
            self._manager.close()

    def _check_kind(self, step: int, lora_only: bool | None, expected: bool) -> None:
        if lora_only is not None and lora_only != expected:
            held, trained = (
                ("LoRA adapters alone", "has none")
                if lora_only
                else ("all weights", "trains LoRA adapters")
            )
            raise ValueError(
                f"The checkpoint of step {step} in {self._root} holds {held}, and this model "
                f"{trained}. Use the model that wrote it, or another checkpoint_root_directory."
            )

    def _check(self, step: int, item: str, stored: Any, wanted: dict[str, Any]) -> None:
        found = {name: tuple(entry.shape) for name, entry in dict(stored).items()}
        for name in sorted(found.keys() | wanted.keys()):
            have, want = found.get(name), None
            if name in wanted:
                want = tuple(wanted[name].shape)
            if have != want:
                raise ValueError(
                    f"The checkpoint of step {step} in {self._root} is of another model: {item} "
                    f"{name!r} is {_shape(have)} there and {_shape(want)} here."
                )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(shape)


def _saved(model: nnx.Module, lora_only: bool) -> dict[str, nnx.Variable]:
    """The variables that a checkpoint holds, by dotted path."""
    return {
        ".".join(map(str, path)): variable
        for path, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Variable)
        and not (
            lora_only
            and isinstance(variable, nnx.Param)
            and not isinstance(variable, nnx.LoRAParam)
        )
    }


def _saved_of_optimizer(optimizer: nnx.Optimizer) -> dict[str, nnx.Variable]:
    return {
        ".".join(map(str, path)): variable
        for path, variable in nnx.iter_graph(optimizer)
        if isinstance(variable, nnx.Variable)
    }


def _arrays(variables: dict[str, nnx.Variable]) -> dict[str, jax.Array]:
    """The arrays of variables; a random key as the numbers it is made of."""
    arrays = {}
    for name, variable in variables.items():
        leaves = jax.tree.leaves(variable.get_raw_value())
        for number, leaf in enumerate(leaves):
            key = name if len(leaves) == 1 else f"{name}.{number}"
            arrays[key] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return arrays


def _set(variables: dict[str, nnx.Variable], arrays: dict[str, jax.Array]) -> None:
    for name, variable in variables.items():
        leaves, structure = jax.tree.flatten(variable.get_raw_value())
        keys = [name] if len(leaves) == 1 else [f"{name}.{n}" for n in range(len(leaves))]
        values = [
            jax.random.wrap_key_data(arrays[key], impl=jax.random.key_impl(leaf))
            if _is_key(leaf)
            else arrays[key]
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        variable.set_raw_value(jax.tree.unflatten(structure, values))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
