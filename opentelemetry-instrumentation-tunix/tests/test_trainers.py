# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Every trainer that builds on PeftTrainer is traced once a step, whatever it overrides.

The classes are imported and the trainers made before anything is instrumented: what a script holds
by then is traced all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_sft
from flax import nnx
from in_memory import Collected
from opentelemetry.instrumentation.tunix import TunixInstrumentor, library, semconv
from opentelemetry.trace import INVALID_SPAN, get_current_span

UPDATES = 2
# One evaluation at entry and one after each update; a checkpoint after each.
WHOLE_RUN = {
    semconv.RUN: 1,
    semconv.MODEL_TRAIN: UPDATES,
    semconv.MODEL_EVAL: 1 + UPDATES,
    semconv.CHECKPOINT_SAVE: UPDATES,
}

Train = Callable[[], None]


def toy_model(seed: int = 0) -> Any:
    from tunix.tests import test_common

    return test_common.ToyTransformer(test_common.ModelConfig(num_layers=1), rngs=nnx.Rngs(seed))


def preference_trainer(folder: str, algorithm: str) -> Train:
    """DPO with a reference model, or ORPO without."""
    from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

    tokens = np.random.default_rng(0).integers(1, 256, size=(2, 8))
    mask = np.ones_like(tokens)
    batch = TrainingInput(
        prompt_ids=tokens,
        prompt_mask=mask,
        chosen_ids=tokens + 0,
        chosen_mask=mask,
        rejected_ids=tokens[::-1],
        rejected_mask=mask,
    )
    trainer = DPOTrainer(
        model=toy_model(),
        ref_model=toy_model() if algorithm == "dpo" else None,
        optimizer=optax.sgd(1e-3),
        training_config=DPOTrainingConfig(
            algorithm=algorithm,
            eval_every_n_steps=1,
            max_steps=UPDATES,
            checkpoint_root_directory=folder,
        ),
    )
    return lambda: trainer.train([batch] * UPDATES, [batch])


def distillation_trainer(folder: str) -> Train:
    from tunix.distillation import strategies
    from tunix.distillation.distillation_trainer import (
        DistillationTrainer,
        TrainingConfig,
        TrainingInput,
    )

    def logits(model: Any, input_tokens: Any, input_mask: Any) -> Any:
        return model(input_tokens, None, None, None)[0]

    def labels(input_tokens: Any, input_mask: Any) -> Any:
        return jax.nn.one_hot(input_tokens, 256)

    tokens = np.random.default_rng(0).integers(1, 256, size=(2, 8))
    batch = TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))
    trainer = DistillationTrainer(
        toy_model(),
        toy_model(1),
        strategies.LogitStrategy(logits, logits, labels),
        optax.sgd(1e-3),
        TrainingConfig(eval_every_n_steps=1, max_steps=UPDATES, checkpoint_root_directory=folder),
    )
    return lambda: trainer.train([batch] * UPDATES, [batch])


class Tiny(nnx.Module):
    """One number."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.mean((model.weight[...] - x) ** 2)


def small_trainer(cls: type, folder: str | None) -> Any:
    from tunix.sft.peft_trainer import TrainingConfig

    trainer = cls(
        Tiny(),
        optax.sgd(1e-3),
        TrainingConfig(eval_every_n_steps=1, max_steps=UPDATES, checkpoint_root_directory=folder),
    )
    return trainer.with_loss_fn(loss_fn).with_gen_model_input_fn(lambda batch: batch)


def tiny_batches(count: int) -> list[Any]:
    return [{"x": np.full((2,), float(i))} for i in range(count)]


def subclass_that_calls_super(folder: str) -> Train:
    """Each overridden method calls the one it overrides; two levels of it."""
    from tunix.sft.peft_trainer import PeftTrainer

    class Own(PeftTrainer):
        def train(self, *args: Any, **kwargs: Any) -> None:
            super().train(*args, **kwargs)

        def _train_step(self, model: Any, optimizer: Any, inputs: Any) -> Any:
            return super()._train_step(model, optimizer, inputs)

        def _run_eval(self, *args: Any, **kwargs: Any) -> None:
            super()._run_eval(*args, **kwargs)

        def jit_train_and_eval_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().jit_train_and_eval_step(*args, **kwargs)

    class Further(Own):
        def train(self, *args: Any, **kwargs: Any) -> None:
            super().train(*args, **kwargs)

        def jit_train_and_eval_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().jit_train_and_eval_step(*args, **kwargs)

    trainer = small_trainer(Further, folder)
    return lambda: trainer.train(tiny_batches(UPDATES), tiny_batches(1))


def subclass_with_a_step_of_its_own(folder: str) -> Train:
    """The body of the step is the user's; the loop is the library's."""
    from tunix.sft.peft_trainer import PeftTrainer

    class Own(PeftTrainer):
        def _train_step(self, model: Any, optimizer: Any, inputs: Any) -> Any:
            loss, gradients = nnx.value_and_grad(loss_fn)(model, **inputs)
            optimizer.update(model, gradients)
            without_norm = library.detect().version in ("0.1.4", "0.1.5")
            return (loss, None, optax.global_norm(gradients))[: 2 if without_norm else 3]

    trainer = small_trainer(Own, folder)
    return lambda: trainer.train(tiny_batches(UPDATES), tiny_batches(1))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda folder: preference_trainer(folder, "dpo"), id="dpo"),
        pytest.param(lambda folder: preference_trainer(folder, "orpo"), id="orpo"),
        distillation_trainer,
        subclass_that_calls_super,
        subclass_with_a_step_of_its_own,
    ],
)
def test_a_trainer_made_before_instrumenting_is_traced_once_a_step(
    collected: Collected, tmp_path: Any, make: Callable[[str], Train]
) -> None:
    """No span too few, and none twice for a method that calls the one it overrides."""
    train = make(str(tmp_path))
    TunixInstrumentor().instrument(**collected.providers())
    try:
        train()
    finally:
        TunixInstrumentor().uninstrument()
    assert Counter(collected.names()) == WHOLE_RUN
    steps = collected.spans(semconv.MODEL_TRAIN)
    assert [s.attributes[semconv.TRAINING_STEP] for s in steps] == [1, 2]
    events = Counter(
        (event.attributes[semconv.TRAINING_MODE], event.attributes[semconv.TRAINING_STEP])
        for event in collected.events(semconv.STEP_COMPLETED)
        if semconv.TRAINING_LOSS in event.body
    )
    assert events == {
        ("train", 1): 1,
        ("train", 2): 1,
        ("eval", 0): 1,
        ("eval", 1): 1,
        ("eval", 2): 1,
    }


def test_a_loop_and_an_evaluation_of_the_users_own_have_step_spans_only(
    collected: Collected,
) -> None:
    """Nothing of the library runs but its compiled step: that is traced, once a call."""
    from tunix.sft.peft_trainer import PeftTrainer

    class Own(PeftTrainer):
        def train(self, train_ds: Any, eval_ds: Any = None, **_: Any) -> None:
            step, evaluate = self.jit_train_and_eval_step()
            bound = () if hasattr(step, "func") else (self.model, self.optimizer)
            for batch in train_ds:
                step(*bound, batch)
                self._iter_steps += 1
                self._train_steps += 1
            self._run_eval(eval_ds, evaluate)

        def _run_eval(self, eval_ds: Any, eval_step: Any) -> None:
            bound = () if hasattr(eval_step, "func") else (self.model,)
            for batch in eval_ds:
                eval_step(*bound, batch)

    trainer = small_trainer(Own, None)
    TunixInstrumentor().instrument(**collected.providers())
    try:
        trainer.train(tiny_batches(3), tiny_batches(1))
    finally:
        TunixInstrumentor().uninstrument()
    assert collected.names() == [semconv.MODEL_TRAIN] * 3
    assert [s.attributes[semconv.TRAINING_STEP] for s in collected.spans()] == [1, 2, 3]


def test_a_trainer_whose_property_raises_trains_and_is_traced(
    instrumented: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    """What telemetry cannot read is told once; result, spans and current span are as ever."""
    from tunix.sft.peft_trainer import PeftTrainer

    class Own(PeftTrainer):
        @property
        def train_steps(self) -> int:
            raise RuntimeError("not yet")

    trainer = small_trainer(Own, None)
    trainer.train(tiny_batches(UPDATES))
    assert get_current_span() is INVALID_SPAN
    assert Counter(instrumented.names()) == {semconv.RUN: 1, semconv.MODEL_TRAIN: UPDATES}
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("opentelemetry")]
    assert ours
    assert len(ours) == len(set(ours))
    assert len(trainer.metrics_logger.get_metric_history("", "loss", "train")) == UPDATES


@pytest.mark.skipif(
    library.detect().version in ("0.1.4", "0.1.5"),
    reason="adapters of the toy model do not train on these releases, instrumented or not",
)
def test_lora_adapters_are_told_from_the_model_they_adapt(instrumented: Collected) -> None:
    """The run says lora, and how few numbers are trained."""
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
    from tunix.tests import test_common

    model = test_common.get_lora_model(toy_model())
    trainer = PeftTrainer(
        model, optax.sgd(1e-3), TrainingConfig(eval_every_n_steps=10, max_steps=1)
    )
    trainer.with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": jnp.arange(toy_sft.LENGTH)[None],
            "attention_mask": jnp.ones((toy_sft.LENGTH, toy_sft.LENGTH), bool),
        }
    )
    trainer.train(toy_sft.batches(1))
    (run_span,) = instrumented.spans(semconv.RUN)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    everything = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert run_span.attributes[semconv.RUN_ADAPTATION] == "lora"
    assert run_span.attributes[semconv.RUN_TRAINABLE] == adapters
    assert run_span.attributes[semconv.RUN_PARAMETERS] == everything
    assert 0 < adapters < everything
