# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of a trainer.

A model and its optimizer are taken apart once. What is compiled takes and returns lists of arrays;
each call reads them from the variables and writes them back, so that weights may be changed from
outside between two steps. Of the model, only what a step changes is returned: the frozen weights
under LoRA are not copied.

With gradient accumulation, a micro-batch adds `weight * gradient`, the weight being what its loss
is a mean over, and an update divides by the sum of weights. It therefore equals one step over all
micro-batches at once, however unequal they are. Forward and backward pass are compiled once, and
apart from them the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from tunix.sft._loss import Outcome
from tunix.sft.sharding_utils import zeros_beside

Path = tuple[Any, ...]
GradientFn = Callable[[nnx.Module, Any], tuple[Outcome, Any]]
StepFn = Callable[[nnx.Module, nnx.Optimizer, Any], tuple[Any, Any, Any]]

_LEARNING_RATE: Path = ("hyperparams", "learning_rate")


class StepOutput(NamedTuple):
    """What one micro-batch gave; arrays on the device, which may still be working.

    Attributes:
        loss: Of the update so far: at its last micro-batch, of the update.
        aux: What the loss function returned beside it.
        grad_norm: Global norm of the update's gradient; None before its last micro-batch.
        learning_rate: That of the update, where `optax.inject_hyperparams` tells; else None.
    """

    loss: Any
    aux: Any
    grad_norm: Any
    learning_rate: Any


class _Variables:
    """Variables of a graph node as lists of arrays."""

    def __init__(self, node: Any, state: Any) -> None:
        live = {path: v for path, v in nnx.iter_graph(node) if isinstance(v, nnx.Variable)}
        flat, _ = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
        self._paths: list[Path] = [tuple(key.key for key in path) for path, _ in flat]
        self._variables: list[nnx.Variable] = [live[path] for path in self._paths]
        self._structure = jax.tree.structure(state)
        # The compiler is told: left alone it names the same place otherwise, and the next step is
        # compiled for the new name.
        self.places = [_place(leaf) for leaf in self.read()]

    def read(self) -> list[Any]:
        """The arrays now."""
        return jax.tree.leaves([v.get_raw_value() for v in self._variables])

    def write(self, leaves: Sequence[Any]) -> None:
        """Sets the variables."""
        rest = iter(leaves)
        for variable in self._variables:
            structure = jax.tree.structure(variable.get_raw_value())
            variable.set_raw_value(
                jax.tree.unflatten(structure, [next(rest) for _ in range(structure.num_leaves)])
            )

    def state(self, leaves: Sequence[Any]) -> Any:
        """The state with other arrays, while it is traced."""
        return jax.tree.unflatten(self._structure, leaves)

    def of(self, node: Any) -> list[Any]:
        """The arrays of a node of the same kind, while it is traced."""
        live = {path: v for path, v in nnx.iter_graph(node) if isinstance(v, nnx.Variable)}
        return jax.tree.leaves([live[path].get_raw_value() for path in self._paths])

    def find(self, end: Path) -> int | None:
        """Which variable's path ends so; None where none does."""
        return next((i for i, p in enumerate(self._paths) if p[-len(end) :] == end), None)


class Steps:
    """Train and evaluation step of one model and optimizer.

    Args:
        model: The model.
        optimizer: Its optimizer.
        trained: The kind of variable that the optimizer changes.
        step: An update from one batch, for runs without accumulation.
        gradients: Outcome and gradients of one micro-batch, for runs with.
        evaluate: Outcome of an evaluation batch.
        accumulation: Micro-batches of an update.
        mesh: The mesh that the weights lie on.
        jit: Whether to compile.

    Attributes:
        compiled: Whether they are.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *,
        trained: type[nnx.Variable],
        step: StepFn,
        gradients: GradientFn,
        evaluate: Callable[[nnx.Module, Any], Outcome],
        accumulation: int,
        mesh: Mesh | None,
        jit: bool,
    ) -> None:
        def frozen(path: Any, value: Any) -> bool:
            del path
            kind = getattr(value, "type", type(value))
            return issubclass(kind, nnx.Param) and not issubclass(kind, trained)

        self.graph, fixed, changing = nnx.split(model, frozen, ...)
        self._optimizer_graph, optimizer_state = nnx.split(optimizer)
        self._fixed = _Variables(model, fixed)
        self._changing = _Variables(model, changing)
        self._optimizer = _Variables(optimizer, optimizer_state)
        self._rate = self._optimizer.find(_LEARNING_RATE)
        self._mesh = mesh
        self._accumulation = accumulation
        self._micro_step = 0
        _, gradients_state, _ = nnx.split(model, trained, ...)
        self._trained = _Variables(model, gradients_state)
        self._counter = optimizer.step
        self._sums: Any = None
        self.compiled = jit
        compile_ = jax.jit if jit else _as_it_is
        at, state = self._changing.places, self._optimizer.places
        counter = _place(self._counter.get_raw_value())
        sums = [self._trained.places, counter, counter]
        self._train = compile_(
            self._train_step(step),
            donate_argnums=(2,),
            out_shardings=(at, state, None, None, None, None),
        )
        self._add = compile_(
            self._accumulate_step(gradients),
            donate_argnums=(2,),
            out_shardings=(at, sums, None, None),
        )
        self._apply = compile_(
            self._update_step(),
            donate_argnums=(2, 3),
            out_shardings=(at, state, sums, None, None, None),
        )
        self._evaluate = compile_(self._eval_step(evaluate))

    def train(self, batch: Any) -> StepOutput:
        """One micro-batch; at the last of an update, the update."""
        with self._on_mesh():
            if self._accumulation > 1:
                return self._accumulate(batch)
            changed, state, *output = self._train(
                self._fixed.read(), self._changing.read(), self._optimizer.read(), batch
            )
        self._changing.write(changed)
        self._optimizer.write(state)
        return StepOutput(*output)

    def evaluate(self, batch: Any) -> Outcome:
        """One batch of an evaluation."""
        with self._on_mesh():
            return Outcome(*self._evaluate(self._fixed.read(), self._changing.read(), batch))

    def cache_size(self) -> int:
        """How many versions of the train step were compiled."""
        train: Any = self._add if self._accumulation > 1 else self._train
        return train._cache_size()

    def _accumulate(self, batch: Any) -> StepOutput:
        if self._sums is None:
            self._sums = [
                [zeros_beside(v, _wide(v.dtype)) for v in self._trained.read()],
                zeros_beside(self._counter.get_raw_value(), jnp.float32),
                zeros_beside(self._counter.get_raw_value(), jnp.float32),
            ]
        changed, self._sums, loss, aux = self._add(
            self._fixed.read(), self._changing.read(), self._sums, batch
        )
        self._changing.write(changed)
        self._micro_step = (self._micro_step + 1) % self._accumulation
        if self._micro_step:
            return StepOutput(loss, aux, None, None)
        changed, state, self._sums, loss, grad_norm, rate = self._apply(
            self._fixed.read(), self._changing.read(), self._optimizer.read(), self._sums
        )
        self._changing.write(changed)
        self._optimizer.write(state)
        return StepOutput(loss, aux, grad_norm, rate)

    def _on_mesh(self) -> Any:
        if self._mesh is None or not jax.sharding.get_abstract_mesh().empty:
            return contextlib.nullcontext()
        return jax.set_mesh(self._mesh)

    # Traced -------------------------------------------------------------------------------------

    def _model(self, fixed: Any, changing: Any) -> Any:
        return nnx.merge(self.graph, self._fixed.state(fixed), self._changing.state(changing))

    def _outputs(self, model: Any, optimizer: Any) -> tuple[list[Any], list[Any], Any]:
        state = self._optimizer.of(optimizer)
        rate = None if self._rate is None else state[self._rate]
        return self._changing.of(model), state, rate

    def _train_step(self, step: StepFn) -> Callable[..., Any]:
        def _train_step(fixed: Any, changing: Any, state: Any, batch: Any) -> Any:
            model = self._model(fixed, changing)
            optimizer = nnx.merge(self._optimizer_graph, self._optimizer.state(state))
            loss, aux, grad_norm = step(model, optimizer, batch)
            changed, state, rate = self._outputs(model, optimizer)
            return changed, state, loss, aux, grad_norm, rate

        return _train_step

    def _accumulate_step(self, gradients: GradientFn) -> Callable[..., Any]:
        def _train_step(fixed: Any, changing: Any, sums: Any, batch: Any) -> Any:
            model = self._model(fixed, changing)
            outcome, found = gradients(model, batch)
            weight = outcome.weight
            total = [
                so_far + g.astype(so_far.dtype) * weight
                for so_far, g in zip(sums[0], jax.tree.leaves(found), strict=True)
            ]
            loss, weight = sums[1] + outcome.loss * weight, sums[2] + weight
            return self._changing.of(model), [total, loss, weight], loss / weight, outcome.aux

        return _train_step

    def _update_step(self) -> Callable[..., Any]:
        def _update(fixed: Any, changing: Any, state: Any, sums: Any) -> Any:
            model = self._model(fixed, changing)
            optimizer = nnx.merge(self._optimizer_graph, self._optimizer.state(state))
            total, loss, weight = sums
            # An update over nothing: no gradient, and a loss of which nothing is known.
            means = [
                (g / jnp.where(weight == 0, 1, weight)).astype(v.dtype)
                for g, v in zip(total, self._trained.of(model), strict=True)
            ]
            gradients = self._trained.state(means)
            grad_norm = optax.tree.norm(gradients)
            optimizer.update(model, gradients)
            changed, state, rate = self._outputs(model, optimizer)
            empty = jax.tree.map(jnp.zeros_like, sums)
            return changed, state, empty, loss / weight, grad_norm, rate

        return _update

    def _eval_step(self, evaluate: Callable[[nnx.Module, Any], Outcome]) -> Callable[..., Any]:
        def _eval_step(fixed: Any, changing: Any, batch: Any) -> Any:
            return tuple(evaluate(self._model(fixed, changing), batch))

        return _eval_step


def _place(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _wide(dtype: Any) -> Any:
    """The type of a sum of many: in bfloat16 most of them would be lost."""
    return jnp.promote_types(dtype, jnp.float32)


def _as_it_is(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return function
