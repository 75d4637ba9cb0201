# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised training of a whole model or of its LoRA adapters.

    trainer = PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=100, max_steps=1000))
    trainer.with_gen_model_input_fn(model_input).train(train_ds, eval_ds)

Each phase is a method: `train`, `train_step`, `evaluate`, `save_checkpoint`, `restore`. There is no
tracing here; who wants to see phases wraps them.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tunix.sft import _data as data
from tunix.sft import hooks, sharding_utils, utils
from tunix.sft._loss import Outcome, as_outcome, default_loss_fn, outcome
from tunix.sft._metrics_buffer import (
    MetricsBuffer,
    buffer_of,
    loss_values,
    values_of,
    weighted_mean,
)
from tunix.sft._steps import Steps
from tunix.sft._training_config import TrainingConfig, TrainingInput
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode
from tunix.sft.profiler import Profiler
from tunix.sft.progress_bar import ProgressBar

__all__ = [
    "MetricsBuffer",
    "MetricsLogger",
    "MetricsLoggerOptions",
    "PeftTrainer",
    "TrainingConfig",
    "TrainingInput",
]

_log = logging.getLogger(__name__)


class PeftTrainer:
    """Trains a model on a data set: its LoRA parameters where it has any, else all of them.

    Training goes on where the newest checkpoint below `checkpoint_root_directory` ended.

    Args:
        model: The model; changed in place.
        optimizer: What makes updates of gradients. Made with `optax.inject_hyperparams`, its
            learning rate is logged.
        training_config: How to train.
        metrics_logger: Where losses go; stays open at the end. By default one of its own.
        perf_tracer: An object with `span(name, devices)`, put around each micro-batch.
        perf_tracer_v2: Another one.

    Attributes:
        model: The model.
        optimizer: The `nnx.Optimizer`.
        config: How to train.
        loss_fn: Called with the model and the model's inputs.
        eval_loss_fn: The same, in evaluations.
        gen_model_input_fn: Makes keyword arguments of the loss function of a batch.
        checkpoint_manager: Saves and restores.
        metrics_logger: Where losses go.
        metrics_prefix: In front of their names.
        is_managed_externally: Whether somebody else decides where training ends: `train` then
            trains on everything it is given, skips nothing, and does not close.
        training_hooks: Called around training, steps and evaluations.
        data_hooks: Gives the batches in place of the data sets.

    Raises:
        ValueError: The configuration cannot be followed, the model has no weights, the mesh lacks
            an axis, or the checkpoint is of another model.
        TypeError: A number of the configuration is no integer.
    """

    supports_sequence_packing = False

    def __init__(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        training_config: TrainingConfig,
        metrics_logger: MetricsLogger | None = None,
        perf_tracer: Any = None,
        perf_tracer_v2: Any = None,
    ) -> None:
        training_config.check()
        self.model = model
        self.config = training_config
        self._lora_enabled = utils.is_lora_enabled(model)
        self._trained = nnx.LoRAParam if self._lora_enabled else nnx.Param
        if not jax.tree.leaves(nnx.state(model, self._trained)):
            raise ValueError(f"{type(model).__qualname__} has no weights to train")
        self._mesh = sharding_utils.mesh_of(model)
        if self._mesh is not None:
            sharding_utils.check_axes(training_config.data_sharding_axis, self._mesh)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=self._trained)
        sharding_utils.place_together(model, self.optimizer, self._mesh)

        self.loss_fn: Callable[..., Any] = default_loss_fn
        self.eval_loss_fn: Callable[..., Any] = default_loss_fn
        self.gen_model_input_fn: Callable[[Any], dict[str, Any]] = data.default_model_input
        self._has_aux = False
        self.training_hooks: hooks.TrainingHooks | None = None
        self.data_hooks: hooks.DataHooks | None = None
        self.is_managed_externally = False

        self.metrics_prefix = training_config.metrics_prefix
        self._owns_logger = metrics_logger is None
        self.metrics_logger: Any = metrics_logger or MetricsLogger(
            training_config.metrics_logging_options
        )
        self._tracers = [tracer for tracer in (perf_tracer, perf_tracer_v2) if tracer is not None]
        self.checkpoint_manager = CheckpointManager(
            training_config.checkpoint_root_directory, training_config.checkpointing_options
        )

        self._mode = Mode.TRAIN
        self._steps: Steps | None = None
        self._train_steps = self._iter_steps = 0
        self._restored_custom_metadata: dict[str, Any] = {}
        self.restore()
        self._inflight: collections.deque[Any] = collections.deque()
        self._unwritten: collections.deque[MetricsBuffer] = collections.deque()
        self._pbar: ProgressBar | None = None
        self._closed = False
        limit = training_config.max_steps
        self._profiler = Profiler(
            self._iter_steps,
            None if limit is None else limit * self._accumulation,
            training_config.profiler_options,
        )

    # What is trained ----------------------------------------------------------------------------

    def with_training_hooks(self, training_hooks: hooks.TrainingHooks) -> None:
        """Sets what is called around training, steps and evaluations."""
        self.training_hooks = training_hooks

    def with_data_hooks(self, data_hooks: hooks.DataHooks) -> None:
        """Sets what gives the batches in place of the data sets."""
        self.data_hooks = data_hooks

    def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> PeftTrainer:
        """Sets the loss function, for evaluations too.

        Args:
            loss_fn: Called with the model and the keyword arguments that `gen_model_input_fn` made.
                Returns a mean, or `(mean, denominator)`: over how much it is one. Micro-batches of
                an update, and batches of an evaluation, weigh as much as their denominators;
                equally where there is none.
            has_aux: Whether it returns a pair of that and anything else.

        Returns:
            The trainer.
        """
        self.clear_jit_cache()
        self.loss_fn = self.eval_loss_fn = loss_fn
        self._has_aux = has_aux
        return self

    def with_gen_model_input_fn(
        self, gen_model_input_fn: Callable[[Any], dict[str, Any]]
    ) -> PeftTrainer:
        """Sets what makes keyword arguments of the loss function of a batch; compiled with it.

        Returns:
            The trainer.
        """
        self.clear_jit_cache()
        self.gen_model_input_fn = gen_model_input_fn
        return self

    def clear_jit_cache(self) -> None:
        """Has the steps compiled anew, after something that they use was replaced.

        Micro-batches of an update that is not complete are forgotten.
        """
        self._steps = None
        self._iter_steps -= self._iter_steps % self._accumulation

    @property
    def train_steps(self) -> int:
        """Updates done, those of a restored checkpoint included."""
        return self._train_steps

    @property
    def iter_steps(self) -> int:
        """Micro-batches done."""
        return self._iter_steps

    @property
    def _accumulation(self) -> int:
        return int(self.config.get_with_default("gradient_accumulation_steps", 1))

    # Steps --------------------------------------------------------------------------------------

    def create_train_step_fn(self) -> Callable[..., tuple[Any, Any, Any]]:
        """Returns `(model, optimizer, batch) -> (loss, aux, gradient norm)`, one update.

        A subclass may return one of its own, for runs without gradient accumulation.
        """
        return self._train_step

    def create_eval_step_fn(self) -> Callable[..., Any]:
        """Returns `(model, batch) -> (loss, denominator, aux)`."""
        return self._eval_step

    def jit_train_and_eval_step(
        self, skip_jit: bool = False, cache_nnx_graph: bool = False
    ) -> tuple[Callable[[Any], tuple[Any, Any, Any]], Callable[[Any], tuple[Any, Any]]]:
        """Returns the steps of the trainer's model, compiled when they are first called.

        Args:
            skip_jit: Whether to leave them uncompiled.
            cache_nnx_graph: Whether the structure of model and optimizer is the same as before.

        Returns:
            `batch -> (loss, aux, gradient norm)` and `batch -> (loss, aux)`; no counters move.
        """
        self._steps = steps = self._make_steps(jit=not skip_jit, reuse=cache_nnx_graph)

        def train_step(batch: Any) -> tuple[Any, Any, Any]:
            return steps.train(batch)[:3]

        def eval_step(batch: Any) -> tuple[Any, Any]:
            found = steps.evaluate(batch)
            return found.loss, found.aux

        return train_step, eval_step

    def train_step(self, batch: Any) -> jax.Array:
        """Trains on one micro-batch; at the last of an update, changes the weights.

        Returns without waiting for the device.

        Args:
            batch: As the data set gives it.

        Returns:
            Loss of the update so far.
        """
        self._write_metrics(leave=1)
        steps = self._ready_steps()
        found = steps.train(self._on_devices(batch))
        self._iter_steps += 1
        if found.grad_norm is not None:
            self._train_steps += 1
            self._unwritten.append(buffer_of(found, self._train_steps))
        self._post_process_train_step(found.aux)
        self._inflight.append(found.loss)
        return found.loss

    def eval_step(self, batch: Any) -> Outcome:
        """Finds the loss of one batch of an evaluation.

        Returns without waiting for the device.

        Args:
            batch: As the data set gives it.

        Returns:
            Loss, denominator, and what the loss function returned beside them.
        """
        found = self._ready_steps().evaluate(self._on_devices(batch))
        self._post_process_eval_step(found.aux)
        return found

    def _train_step(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Any
    ) -> tuple[jax.Array, Any, jax.Array]:
        found, gradients = self._gradients(model, batch)
        grad_norm = optax.tree.norm(gradients)
        optimizer.update(model, gradients)
        loss = jnp.where(found.weight == 0, jnp.nan, found.loss)  # a mean over nothing
        return loss, found.aux, grad_norm

    def _gradients(self, model: nnx.Module, batch: Any) -> tuple[Outcome, Any]:
        inputs = self.gen_model_input_fn(batch)

        def objective(model: nnx.Module) -> tuple[jax.Array, Outcome]:
            found = outcome(self.loss_fn(model, **inputs), has_aux=self._has_aux)
            return found.loss, found

        differentiate = nnx.value_and_grad(
            objective, argnums=nnx.DiffState(0, self._trained), has_aux=True
        )
        (_, found), gradients = differentiate(model)
        return found, gradients

    def _eval_step(self, model: nnx.Module, batch: Any) -> Outcome:
        inputs = self.gen_model_input_fn(batch)
        return outcome(self.eval_loss_fn(model, **inputs), has_aux=self._has_aux)

    def _make_steps(self, *, jit: bool, reuse: bool) -> Steps:
        if self._steps is not None and reuse and self._steps.compiled == jit:
            return self._steps
        self.clear_jit_cache()
        step, evaluate = self.create_train_step_fn(), self.create_eval_step_fn()
        if self._accumulation > 1 and step != self._train_step:
            raise ValueError(
                f"{type(self).__name__} has a train step of its own, and gradients of "
                f"{self._accumulation} micro-batches cannot be taken out of it: set "
                "gradient_accumulation_steps to 1, or give a loss function instead."
            )
        return Steps(
            self.model,
            self.optimizer,
            trained=self._trained,
            step=step,
            gradients=self._gradients,
            evaluate=lambda model, batch: as_outcome(evaluate(model, batch)),
            accumulation=self._accumulation,
            mesh=self._mesh,
            jit=jit,
        )

    def _ready_steps(self) -> Steps:
        if self._steps is None:
            self._steps = self._make_steps(jit=True, reuse=False)
        return self._steps

    def _on_devices(self, batch: Any) -> Any:
        batch = self._prepare_inputs(batch)
        return sharding_utils.shard_input(batch, self.config.data_sharding_axis, self._mesh)

    def _prepare_inputs(self, input_data: Any) -> Any:
        """A subclass may do more with a batch before it is sent to the devices."""
        return input_data

    def _post_process_train_step(self, aux: Any) -> None:
        """A subclass may keep what the loss function returned beside the loss."""

    def _post_process_eval_step(self, aux: Any) -> None:
        """A subclass may keep what the loss function returned beside the loss."""

    # Training -----------------------------------------------------------------------------------

    def train(
        self,
        train_ds: Iterable[Any],
        eval_ds: Iterable[Any] | None = None,
        skip_jit: bool = False,
        *,
        cache_nnx_graph: bool = True,
    ) -> None:
        """Trains to the end of the data or to `max_steps`, evaluates in between, and closes.

        Args:
            train_ds: Micro-batches. Of a resumed run, those that were trained on are skipped.
            eval_ds: Batches for an evaluation at the start and after each `eval_every_n_steps`.
            skip_jit: Whether to run uncompiled, to look into a step.
            cache_nnx_graph: Whether the structure of the model stays what it was in the last call.

        Raises:
            RuntimeError: The trainer is closed, and its checkpoints with it.
            ValueError: `train_ds` has no batch.
        """
        if self._closed and self.config.checkpoint_root_directory is not None:
            raise RuntimeError(
                "This trainer is closed and cannot save any more: make another one, which goes on "
                "from its last checkpoint, or set is_managed_externally before training."
            )
        self._closed = False
        self._steps = self._make_steps(jit=not skip_jit, reuse=cache_nnx_graph)
        batches = self._batches(train_ds)  # before any work: they may be none
        evaluations = None if eval_ds is None else data.repeatable(eval_ds)
        if evaluations is not None:
            self.evaluate(evaluations)
        if self._pbar is None:
            self._pbar = ProgressBar(
                self.metrics_prefix,
                self.metrics_logger,
                self._train_steps,
                self.config.max_steps,  # pyright: ignore[reportArgumentType]
                self.config.pbar_description,
            )
        if self.training_hooks:
            self.training_hooks.on_train_start(self)
        try:
            self._loop(batches, evaluations)
        except BaseException:
            self._keep_what_is_known()
            raise
        finally:
            self._profiler.stop()
            self._inflight.clear()
        if self.training_hooks:
            self.training_hooks.on_train_end(self)
        if not self.is_managed_externally:
            self.close()

    def _loop(self, batches: Iterator[Any], eval_ds: Iterable[Any] | None) -> None:
        while not self._is_done():
            updates = self._train_steps
            self._profiler.maybe_activate(self._iter_steps)
            with jax.profiler.StepTraceAnnotation("train", step_num=self._iter_steps):
                batch = self._next_batch(batches)
                if batch is None:
                    break
                self._throttle(self.config.max_inflight_computations - 1)
                if self.training_hooks:
                    self.training_hooks.on_train_step_start(self)
                with self._performance_spans() as spans:
                    loss = self.train_step(batch)
                    for span in spans:
                        span.device_end([loss])
            self._profiler.maybe_deactivate(self._iter_steps)
            if self._train_steps > updates:
                self._write_metrics(leave=1)
                self.save_checkpoint()
                if eval_ds is not None and self._train_steps % self.config.eval_every_n_steps == 0:
                    self.evaluate(eval_ds)
        self._throttle(0)
        self._write_metrics(leave=0)

    def _is_done(self) -> bool:
        limit = self.config.max_steps
        return not self.is_managed_externally and limit is not None and self._train_steps >= limit

    def _batches(self, train_ds: Iterable[Any]) -> Iterator[Any]:
        """The batches that were not trained on yet."""
        batches = iter(train_ds)
        if self.data_hooks or self.is_managed_externally or self._is_done():
            return batches
        return data.after(batches, self._iter_steps)

    def _next_batch(self, batches: Iterator[Any]) -> Any:
        if self.data_hooks:
            return self.data_hooks.load_next_train_batch(self)
        return next(batches, None)

    def _throttle(self, leave: int) -> None:
        """Waits until the device has at most so many micro-batches to do."""
        while len(self._inflight) > leave:
            jax.block_until_ready(self._inflight.popleft())

    @contextlib.contextmanager
    def _performance_spans(self) -> Iterator[list[Any]]:
        devices = None if self._mesh is None else self._mesh.devices
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(tracer.span("peft_train_step", devices))
                for tracer in self._tracers
            ]

    # Evaluation ---------------------------------------------------------------------------------

    def evaluate(self, eval_ds: Iterable[Any]) -> float | None:
        """Logs the loss over a data set, weighted by denominators; changes no weight.

        Args:
            eval_ds: Batches, as for training.

        Returns:
            The loss; None where there is no batch.
        """
        batches = iter(eval_ds)
        losses: list[tuple[Any, Any]] = []
        self._mode = Mode.EVAL
        try:
            while True:
                if self.data_hooks:
                    batch = self.data_hooks.load_next_eval_batch(self)
                else:
                    batch = next(batches, None)
                if batch is None:
                    break
                if self.training_hooks:
                    self.training_hooks.on_eval_step_start(self)
                found = self.eval_step(batch)
                losses.append((found.loss, found.weight))
                if len(losses) >= self.config.max_inflight_computations:
                    jax.block_until_ready(losses[-self.config.max_inflight_computations])
            if not losses:
                _log.warning("eval_ds has no batch: nothing is evaluated.")
                return None
            loss = weighted_mean(losses)
            self._log(loss_values(loss), self._train_steps)
        finally:
            self._mode = Mode.TRAIN
        if self._pbar is not None:
            self._pbar.update_metrics(["loss", "perplexity"], Mode.EVAL)
        if self.training_hooks:
            self.training_hooks.on_eval_step_end(self, loss)
        return loss

    # Metrics ------------------------------------------------------------------------------------

    def _write_metrics(self, leave: int) -> None:
        """Logs updates, oldest first, until so many are left that were not."""
        while len(self._unwritten) > leave:
            buffer = self._unwritten.popleft()
            values = values_of(buffer)
            self._log(values, buffer.step)
            if self._pbar is not None:
                self._pbar.update_metrics(["loss", "perplexity", "learning_rate"], Mode.TRAIN)
                self._pbar.update()
            if self.training_hooks:
                self.training_hooks.on_train_step_end(self, buffer.step, values["loss"])

    def _log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            self.metrics_logger.log(self.metrics_prefix, name, value, self._mode, step)

    def _keep_what_is_known(self) -> None:
        """Logs the updates before the one that failed; what fails with it is no second failure."""
        with contextlib.suppress(Exception):
            while self._unwritten:
                buffer = self._unwritten.popleft()
                self._log(values_of(buffer), buffer.step)
        self._unwritten.clear()
        if self._pbar is not None:
            self._pbar.close()
            self._pbar = None

    # Checkpoints --------------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> int:
        """Goes back to a checkpoint: weights, optimizer, counters.

        Args:
            step: None is the newest.

        Returns:
            Updates done; 0 where there is no checkpoint.

        Raises:
            ValueError: There is no such checkpoint, or it is of another model.
        """
        self._train_steps, self._restored_custom_metadata = self.checkpoint_manager.maybe_restore(
            self.model, self.optimizer, step, restore_only_lora_params=self._lora_enabled
        )
        self._iter_steps = self._train_steps * self._accumulation
        return self._train_steps

    def save_checkpoint(self, force: bool = False) -> bool:
        """Saves a checkpoint where `checkpointing_options` say that it is time.

        Args:
            force: Whether to save at any time.

        Returns:
            Whether one was saved.
        """
        return self.checkpoint_manager.save(
            self._train_steps,
            self.model,
            self.optimizer,
            save_only_lora_params=self._lora_enabled,
            force=force,
            custom_metadata=self.custom_checkpoint_metadata(),
        )

    def custom_checkpoint_metadata(self) -> dict[str, Any]:
        """A subclass may return what is saved with each checkpoint; JSON."""
        return {}

    # End ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Logs and saves what was not yet, and closes what the trainer made. Twice is once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._write_metrics(leave=0)
            newest = self.checkpoint_manager.latest_step()
            if self._train_steps and (newest is None or newest < self._train_steps):
                self.save_checkpoint(force=True)
        finally:
            self.checkpoint_manager.close()
            if self._owns_logger:
                self.metrics_logger.close()
            if self._pbar is not None:
                self._pbar.close()
                self._pbar = None
