# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer does with batches: losses, steps, hooks, evaluation, failures, bad input."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_runs import (
    Number,
    Recorded,
    decoder,
    decoder_trainer,
    losses,
    number_trainer,
    numbers,
    token_batches,
    weights,
    with_lora,
)

from tunix.sft import metrics_logger, peft_trainer
from tunix.sft.hooks import DataHooks
from tunix.sft.peft_trainer import MetricsBuffer, PeftTrainer, TrainingConfig, TrainingInput


def by_step(trainer: PeftTrainer, name: str, mode: str = "train") -> list[float]:
    return trainer.metrics_logger.get_metric_history("", name, mode).tolist()


class LoggedSteps:
    """A logger that has the methods which a trainer calls, and nothing else."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, str, float, str, int]] = []
        self.closed = 0

    def log(self, prefix: str, name: str, value: Any, mode: Any, step: int) -> None:
        self.logged.append((prefix, name, float(value), str(getattr(mode, "value", mode)), step))

    def metric_exists(self, *args: Any) -> bool:
        return False

    def get_metric(self, *args: Any) -> float:
        raise AssertionError

    def close(self) -> None:
        self.closed += 1

    def of(self, name: str, mode: str = "train") -> list[tuple[float, int]]:
        return [(v, s) for _, n, v, m, s in self.logged if (n, m) == (name, mode)]


# Updates ----------------------------------------------------------------------------------------


def test_update_k_has_loss_k_and_step_k_in_the_log_and_in_the_hook() -> None:
    logger, hooks = LoggedSteps(), Recorded()
    trainer = PeftTrainer(
        Number(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=100), metrics_logger=logger
    )
    trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(lambda model, x: x)
    trainer.with_training_hooks(hooks)
    trainer.train(numbers(4))
    assert logger.of("loss") == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
    assert hooks.named("step_end") == [("step_end", k, float(k)) for k in (1, 2, 3, 4)]
    assert (trainer.train_steps, trainer.iter_steps) == (4, 4)


def test_gradient_descent_by_hand() -> None:
    trainer = number_trainer(lambda model, x: x * model.w[...])
    trainer.train(numbers(3))
    assert weights(trainer)[0] == pytest.approx(-0.1 * (1 + 2 + 3))
    # Losses x * w of weights 0, -0.1, -0.3.
    assert losses(trainer) == pytest.approx([0.0, -0.2, -0.9])
    assert by_step(trainer, "grad_norm") == pytest.approx([1, 2, 3])


def test_a_window_of_four_micro_batches_logs_their_mean_and_leaves_the_rest() -> None:
    hooks = Recorded()
    trainer = number_trainer(gradient_accumulation_steps=4)
    trainer.with_training_hooks(hooks)
    trainer.train(numbers(10))
    assert losses(trainer) == [2.5, 6.5]
    assert (trainer.train_steps, trainer.iter_steps) == (2, 10)
    assert hooks.named("step_end") == [("step_end", 1, 2.5), ("step_end", 2, 6.5)]
    assert len(hooks.named("step_start")) == 10


def test_micro_batches_weigh_as_much_as_their_denominators() -> None:
    trainer = number_trainer(
        lambda model, x: (x * (1 + model.w[...]), x), gradient_accumulation_steps=2
    )
    trainer.train(numbers(2))
    assert losses(trainer) == pytest.approx([(1 * 1 + 2 * 2) / 3])
    assert weights(trainer)[0] == pytest.approx(-0.1 * (1 * 1 + 2 * 2) / 3)


def test_micro_batches_left_over_are_part_of_the_next_data_set_of_an_external_manager() -> None:
    trainer = number_trainer(gradient_accumulation_steps=4)
    trainer.is_managed_externally = True
    trainer.train(numbers(6))
    trainer.train(numbers(2, start=7))
    trainer.close()
    assert losses(trainer) == [2.5, 6.5]


def test_replacing_the_loss_forgets_micro_batches_of_the_old_one() -> None:
    trainer = number_trainer(gradient_accumulation_steps=2)
    trainer.is_managed_externally = True
    trainer.train(numbers(3))
    assert trainer.iter_steps == 3
    trainer.with_loss_fn(lambda model, x: x * 10 + model.w[...] * 0)
    assert trainer.iter_steps == 2
    trainer.train(numbers(2))
    assert losses(trainer) == [1.5, 15.0]
    assert (trainer.train_steps, trainer.iter_steps) == (2, 4)


def test_an_update_over_no_token_changes_nothing_and_says_that_its_loss_is_not_known() -> None:
    for accumulation in (1, 2):
        trainer = decoder_trainer(gradient_accumulation_steps=accumulation)
        trainer.optimizer = nnx.Optimizer(trainer.model, optax.sgd(1.0), wrt=nnx.Param)
        before = weights(trainer)
        (batch,) = token_batches(1)
        batch = batch.replace(input_mask=np.zeros_like(batch.input_mask))
        trainer.train([batch] * accumulation)
        assert math.isnan(losses(trainer)[0])
        assert all(np.array_equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_the_default_loss_is_the_mean_over_marked_tokens() -> None:
    trainer = decoder_trainer()
    (batch,) = token_batches(1)
    logits, _ = trainer.model(
        jnp.asarray(batch.input_tokens),
        peft_trainer.utils.build_positions_from_mask(jnp.asarray(batch.input_mask)),
        None,
        peft_trainer.utils.make_causal_attn_mask(jnp.asarray(batch.input_mask)),
    )
    logs = np.asarray(jax.nn.log_softmax(logits, -1))
    found = [
        -logs[row, at - 1, batch.input_tokens[row, at]]
        for row in range(len(logs))
        for at in range(1, logs.shape[1])
        if batch.input_mask[row, at]
    ]
    trainer.train([batch])
    assert losses(trainer)[0] == pytest.approx(np.mean(found), rel=1e-5)


def test_perplexity_is_the_exponential_of_the_loss_and_infinite_where_float64_ends() -> None:
    trainer = number_trainer()
    trainer.train([np.float32(1), np.float32(1000), np.float32(np.nan), np.float32(2)])
    found = by_step(trainer, "perplexity")
    assert found[0] == pytest.approx(math.e)
    assert found[1] == math.inf
    assert math.isnan(found[2])
    assert found[3] == pytest.approx(math.e**2)


def test_the_learning_rate_of_each_update_is_logged_where_the_optimizer_tells_it() -> None:
    trainer = decoder_trainer()
    trainer.train(list(token_batches(3)))
    assert by_step(trainer, "learning_rate") == pytest.approx([0.01, 0.0091, 0.0082])
    plain = number_trainer()
    plain.train(numbers(1))
    assert not plain.metrics_logger.metric_exists("", "learning_rate", "train")


def test_the_loss_falls() -> None:
    trainer = decoder_trainer()
    trainer.train(list(token_batches(1)) * 20)
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]


def test_only_adapters_change_where_there_are_some() -> None:
    trainer = decoder_trainer(with_lora(decoder()))
    before = [np.array(v) for v in jax.tree.leaves(nnx.state(trainer.model, nnx.Param))]
    trainer.train(list(token_batches(3)))
    kinds = jax.tree.leaves(
        nnx.state(trainer.model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for kind, old in zip(kinds, before, strict=True):
        assert np.array_equal(np.asarray(kind[...]), old) != isinstance(kind, nnx.LoRAParam)
    assert 0 < sum(isinstance(kind, nnx.LoRAParam) for kind in kinds) < len(kinds)


def test_frozen_weights_are_not_copied_by_a_step() -> None:
    trainer = decoder_trainer(with_lora(decoder()))
    frozen = trainer.model.embedder.input_embedding
    before = frozen.get_raw_value()
    trainer.train(list(token_batches(2)))
    assert frozen.get_raw_value() is before


def test_state_of_the_model_that_is_no_weight_moves_on() -> None:
    class Counting(Number):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def loss(model: Counting, x: Any) -> Any:
        model.calls[...] += 1
        return x + model.w[...]

    for accumulation in (1, 2):
        trainer = PeftTrainer(
            Counting(),
            optax.sgd(0.1),
            TrainingConfig(eval_every_n_steps=9, gradient_accumulation_steps=accumulation),
        )
        trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(loss)
        trainer.train(numbers(4))
        assert int(trainer.model.calls[...]) == 4


def test_what_a_loss_returns_beside_the_loss_reaches_a_subclass() -> None:
    kept = []

    class Keeping(PeftTrainer):
        def _post_process_train_step(self, aux: Any) -> None:
            kept.append(float(aux["double"]))

    trainer = Keeping(Number(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=9))
    trainer.with_gen_model_input_fn(lambda x: {"x": x})
    trainer.with_loss_fn(lambda model, x: ((x, 1.0), {"double": 2 * x}), has_aux=True)
    trainer.train(numbers(3))
    assert kept == [2, 4, 6]
    assert losses(trainer) == [1, 2, 3]


@pytest.mark.parametrize(
    ("returned", "has_aux", "message"),
    [
        (lambda x: (x, x, x), False, "returns loss or .loss, denominator., got 3 values"),
        (lambda x: x, True, "with has_aux=True the loss function returns .loss, aux."),
        (lambda x: jnp.ones(3) * x, False, "the loss of a loss function is a scalar.*3"),
        (lambda x: (x, jnp.ones((2, 2))), False, "the denominator .* shape .2, 2.*has_aux"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_told_what_to_return(
    returned: Any, has_aux: bool, message: str
) -> None:
    trainer = number_trainer()
    trainer.with_loss_fn(lambda model, x: returned(x + model.w[...]), has_aux=has_aux)
    with pytest.raises(TypeError, match=message):
        trainer.train(numbers(1))


def test_a_step_of_a_subclass_takes_the_place_of_the_update() -> None:
    class Doubling(PeftTrainer):
        def create_train_step_fn(self) -> Any:
            def step(model: Number, optimizer: Any, batch: Any) -> Any:
                model.w[...] += batch
                return model.w[...], None, jnp.float32(7)

            return step

        def create_eval_step_fn(self) -> Any:
            return lambda model, batch: batch * 3

    trainer = Doubling(Number(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=9))
    trainer.train(numbers(3), numbers(2))
    assert losses(trainer) == [1, 3, 6]
    assert losses(trainer, "eval") == [4.5]
    accumulating = Doubling(
        Number(),
        optax.sgd(0.1),
        TrainingConfig(eval_every_n_steps=9, gradient_accumulation_steps=2),
    )
    with pytest.raises(ValueError, match="Doubling has a train step of its own"):
        accumulating.train(numbers(2))


def test_a_step_is_compiled_once_and_not_at_all_without_jit() -> None:
    device = jax.devices()[1]
    for accumulation in (1, 2):
        for model in (decoder(), jax.device_put(decoder(), device), with_lora(decoder())):
            trainer = decoder_trainer(model, gradient_accumulation_steps=accumulation)
            trainer.train(list(token_batches(6)))
            assert trainer._steps.cache_size() == 1
    partly = decoder()
    nnx.update(partly, jax.device_put(nnx.state(partly), device))
    trainer = decoder_trainer(with_lora(partly))  # the adapters have no place of their own
    trainer.train(list(token_batches(2)))
    assert trainer._steps.cache_size() == 1
    seen = []
    eager = number_trainer(lambda model, x: (seen.append(x), x + model.w[...])[1])
    eager.train(numbers(3), skip_jit=True)
    assert [float(x) for x in seen] == [1, 2, 3]


def test_training_uncompiled_after_compiled_runs_uncompiled() -> None:
    trainer = number_trainer()
    trainer.is_managed_externally = True
    trainer.train(numbers(1))
    assert trainer._steps.compiled
    trainer.train(numbers(1), skip_jit=True)
    assert not trainer._steps.compiled


def test_the_steps_can_be_had_without_the_loop() -> None:
    trainer = number_trainer(lambda model, x: x * (1 + model.w[...]))
    train_step, eval_step = trainer.jit_train_and_eval_step()
    loss, aux, grad_norm = train_step(np.float32(2))
    assert (float(loss), aux, float(grad_norm)) == (2.0, None, 2.0)
    assert weights(trainer)[0] == pytest.approx(-0.2)
    loss, aux = eval_step(np.float32(2))
    assert (float(loss), aux) == (pytest.approx(1.6), None)
    assert trainer.train_steps == 0


def test_a_step_called_by_somebody_else_is_logged_once_the_next_was_called() -> None:
    trainer = number_trainer()
    for number in numbers(3):
        trainer.train_step(number)
    assert losses(trainer) == [1.0]
    trainer.close()
    assert losses(trainer) == [1.0, 2.0, 3.0]


def test_the_host_runs_ahead_of_the_device_as_far_as_the_configuration_says() -> None:
    waits: list[float] = []
    real = jax.block_until_ready
    trainer = number_trainer(max_inflight_computations=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            peft_trainer.jax, "block_until_ready", lambda x: waits.append(float(x)) or real(x)
        )
        most = []
        trainer.train_step, step = (
            lambda batch: (most.append(len(trainer._inflight)), step(batch))[1],
            trainer.train_step,
        )
        trainer.train(numbers(6))
    assert waits == [1, 2, 3, 4, 5, 6]
    assert most == [0, 1, 2, 2, 2, 2]


# Length -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "expected"), [(None, 5), (3, 3), (1, 1), (0, 0)])
def test_training_ends_at_max_steps_or_with_the_data(limit: int | None, expected: int) -> None:
    asked = []
    trainer = number_trainer(max_steps=limit)
    trainer.train(asked.append(n) or n for n in numbers(5))
    assert trainer.train_steps == expected == len(losses(trainer))
    assert len(asked) == (5 if limit is None else limit)


def test_a_second_train_of_an_external_manager_goes_on() -> None:
    trainer = number_trainer(max_steps=2)
    trainer.is_managed_externally = True
    trainer.train(numbers(3))
    trainer.train(numbers(2, start=4))
    assert trainer.train_steps == 5
    assert losses(trainer) == [1, 2, 3, 4, 5]
    assert not trainer._closed


def test_data_hooks_give_the_batches() -> None:
    class Data(DataHooks):
        train, evaluation = iter(numbers(3)), iter([])

        def load_next_train_batch(self, train_ctx: Any) -> Any:
            return next(self.train, None)

        def load_next_eval_batch(self, train_ctx: Any) -> Any:
            batch = next(self.evaluation, None)
            if batch is None:
                self.evaluation = iter(numbers(2, start=8))
            return batch

    trainer = number_trainer(eval_every_n_steps=2)
    trainer.with_data_hooks(Data())
    trainer.train([], [])
    assert losses(trainer) == [1, 2, 3]
    assert losses(trainer, "eval") == [8.5]


# Evaluation -------------------------------------------------------------------------------------


def test_evaluation_happens_at_the_start_and_after_every_n_updates() -> None:
    logger, hooks = LoggedSteps(), Recorded()
    trainer = PeftTrainer(
        Number(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=2), metrics_logger=logger
    )
    trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(lambda model, x: x)
    trainer.with_training_hooks(hooks)
    trainer.train(numbers(5), numbers(2, start=3))
    assert logger.of("loss", "eval") == [(3.5, 0), (3.5, 2), (3.5, 4)]
    assert hooks.calls[:3] == [("eval_start",), ("eval_start",), ("eval_end", 3.5)]
    assert hooks.calls[-1] == ("train_end",)
    assert len(hooks.named("eval_start")) == 6


def test_evaluation_changes_no_weight_and_weighs_batches() -> None:
    trainer = number_trainer(lambda model, x: (x + model.w[...], x))
    assert trainer.evaluate(numbers(3)) == pytest.approx((1 + 4 + 9) / 6)
    assert weights(trainer) == [0.0]


def test_every_evaluation_sees_all_batches_of_an_iterator() -> None:
    trainer = number_trainer(eval_every_n_steps=1)
    trainer.train(numbers(2), iter(numbers(2)))
    assert losses(trainer, "eval") == [1.5, 1.5, 1.5]


def test_an_evaluation_without_data_warns_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = number_trainer()
    assert trainer.evaluate([]) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert losses(trainer, "eval") == []


def test_a_failing_evaluation_leaves_the_trainer_in_training_mode() -> None:
    trainer = number_trainer()

    def broken() -> Any:
        yield np.float32(1)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        trainer.evaluate(broken())
    trainer.train(numbers(1))
    assert losses(trainer) == [1.0]
    assert losses(trainer, "eval") == []


# Failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_hook_raises_reaches_the_caller_and_no_update_is_lost(error: BaseException) -> None:
    hooks = Recorded(fails_at=3, error=error)
    trainer = number_trainer()
    trainer.with_training_hooks(hooks)
    with pytest.raises(type(error)) as caught:
        trainer.train(numbers(9))
    assert caught.value is error
    # Update 4 had been dispatched when the end of update 3 was told.
    assert losses(trainer) == [1, 2, 3, 4]
    assert hooks.calls[-1] == ("step_end", 3, 3.0)


def test_an_iterator_that_fails_leaves_the_updates_before_it_logged() -> None:
    def broken() -> Any:
        yield from numbers(3)
        raise OSError("disk")

    trainer = number_trainer()
    with pytest.raises(OSError, match="disk"):
        trainer.train(broken())
    assert losses(trainer) == [1, 2, 3]
    trainer.train(numbers(1))
    assert losses(trainer) == [1, 2, 3] + ([] if trainer.iter_steps == 3 else [1])


def test_a_failing_device_is_the_error_that_the_caller_sees() -> None:
    def check(x: Any) -> Any:
        if x == 3:
            raise ValueError("three")
        return x

    def loss(model: Number, x: jax.Array) -> jax.Array:
        seen = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x)
        return seen + model.w[...] * 0

    trainer = number_trainer(loss)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="three"):
        trainer.train(numbers(5))
    assert losses(trainer) == [1, 2]


# Ownership --------------------------------------------------------------------------------------


def test_a_logger_of_the_callers_stays_open_and_one_of_its_own_is_closed() -> None:
    logger = LoggedSteps()
    trainer = PeftTrainer(
        Number(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=9), metrics_logger=logger
    )
    trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(lambda model, x: x)
    trainer.train(numbers(1))
    trainer.close()
    assert logger.closed == 0
    own = number_trainer()
    closed = []
    own.metrics_logger.close, close = (
        (lambda: (closed.append(1), close())),
        own.metrics_logger.close,
    )
    own.train(numbers(1))
    own.close()
    assert closed == [1]


def test_the_prefix_of_the_configuration_is_in_front_of_every_name() -> None:
    trainer = number_trainer(metrics_prefix="actor")
    trainer.train(numbers(2))
    assert trainer.metrics_logger.get_metric_history("actor", "loss", "train").tolist() == [1, 2]
    assert not trainer.metrics_logger.metric_exists("", "loss", "train")


def test_tracers_of_the_callers_see_each_micro_batch_and_its_loss() -> None:
    class Tracer:
        def __init__(self) -> None:
            self.spans: list[Any] = []

        @contextlib.contextmanager
        def span(self, name: str, devices: Any = None) -> Any:
            class Span:
                def device_end(span, waited: Any) -> None:  # noqa: N805
                    self.spans.append((name, float(waited[0])))

            yield Span()

    first, second = Tracer(), Tracer()
    trainer = PeftTrainer(
        Number(),
        optax.sgd(0.1),
        TrainingConfig(eval_every_n_steps=9),
        perf_tracer=first,
        perf_tracer_v2=second,
    )
    trainer.with_gen_model_input_fn(lambda x: {"x": x}).with_loss_fn(lambda model, x: x)
    trainer.train(numbers(2))
    assert first.spans == second.spans == [("peft_train_step", 1.0), ("peft_train_step", 2.0)]


def test_the_bar_counts_updates_and_shows_the_mean_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar(peft_trainer.ProgressBar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.moved = 0
            bars.append(self)

        def update(self, n: int = 1) -> None:
            self.moved += n
            super().update(n)

    monkeypatch.setattr(peft_trainer, "ProgressBar", Bar)
    trainer = number_trainer(gradient_accumulation_steps=4)
    trainer.train(numbers(10))
    assert bars[0].moved == 2
    assert bars[0].metrics["train_loss"] == 4.5


def test_names_of_the_module_are_those_of_google_tunix() -> None:
    assert set(peft_trainer.__all__) >= {"MetricsBuffer", "PeftTrainer", "TrainingConfig"}
    assert peft_trainer.MetricsLogger is metrics_logger.MetricsLogger
    assert MetricsBuffer(step=1, losses=[jnp.float32(1), jnp.float32(2)]).loss == 1.5


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"max_steps": -1}, ValueError, "max_steps must be 0 or more, got -1"),
        ({"max_steps": 1.5}, TypeError, "max_steps must be an integer, got 1.5"),
        ({"gradient_accumulation_steps": 0}, ValueError, "steps must be 1 or more, got 0"),
        ({"eval_every_n_steps": 0}, ValueError, "eval_every_n_steps must be 1 or more"),
        ({"max_inflight_computations": 0}, ValueError, "max_inflight_computations must be 1"),
        ({"data_sharding_axis": "fsdp"}, TypeError, r"write \('fsdp',\)"),
        ({"max_seq_token_per_tpu": 8}, ValueError, "sequence packing is not supported"),
    ],
)
def test_a_bad_configuration_fails_before_there_is_a_trainer(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TrainingConfig(**{"eval_every_n_steps": 1, **changed})
    config = TrainingConfig(eval_every_n_steps=1)
    for name, value in changed.items():
        setattr(config, name, value)
    with pytest.raises(error, match=message):
        PeftTrainer(Number(), optax.sgd(0.1), config)


def test_an_empty_data_set_fails_before_training_begins() -> None:
    hooks = Recorded()
    trainer = number_trainer()
    trainer.with_training_hooks(hooks)
    with pytest.raises(ValueError, match="train_ds has no batch"):
        trainer.train([], numbers(1))
    assert hooks.calls == []


def test_images_are_refused() -> None:
    trainer = decoder_trainer()
    (batch,) = token_batches(1)
    with pytest.raises(ValueError, match="images are not supported"):
        trainer.train([batch.replace(images=np.zeros(1))])


def test_an_axis_that_the_mesh_has_not_is_named() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("fsdp", "tp"))
    with pytest.raises(ValueError, match=r"names 'data', which the mesh has not.*fsdp, tp"):
        decoder_trainer(decoder(mesh=mesh), data_sharding_axis=("data",))


def test_a_model_without_weights_is_refused() -> None:
    class Empty(nnx.Module):
        pass

    with pytest.raises(ValueError, match="Empty has no weights to train"):
        PeftTrainer(Empty(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=1))


def test_training_goes_on_quietly_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    number_trainer().train(numbers(2))
    assert capsys.readouterr().err == ""


def test_a_training_input_is_a_pytree() -> None:
    (batch,) = token_batches(1)
    assert isinstance(batch, TrainingInput)
    assert len(jax.tree.leaves(batch)) == 2
