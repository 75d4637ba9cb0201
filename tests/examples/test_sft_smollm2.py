# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Data, loss and training loop of the SFT example, on a decoder of one small layer."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sft_flags
import sft_smollm2 as sft
import smollm2
from tunix.models.llama3 import model as llama3


@pytest.fixture(scope="module")
def examples(tokenizer):
    return sft.make_examples(tokenizer, ["count_bits"], 24, length=64, seed=0)


@pytest.fixture(scope="module")
def tiny_examples(examples):
    """The same examples in the vocabulary of the small decoder."""

    def shrink(example):
        return dataclasses.replace(example, input_tokens=example.input_tokens % 64)

    return dataclasses.replace(
        examples,
        train=[shrink(example) for example in examples.train],
        held_out=[shrink(example) for example in examples.held_out],
    )


@pytest.fixture
def tiny_model():
    config = llama3.ModelConfig(
        num_layers=1,
        vocab_size=64,
        embed_dim=8,
        hidden_dim=8,
        num_heads=2,
        head_dim=4,
        num_kv_heads=1,
        rope_theta=10_000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    return sft.add_lora(llama3.Llama3(config, rngs=nnx.Rngs(0)), rank=2, alpha=4.0, seed=0)


def flags(*arguments):
    return sft_flags.parse(list(arguments))


def train(model, examples, chosen):
    """Trains as `run` does, and returns the exit code and the trainer."""
    trainer = sft.make_trainer(model, chosen)
    batches = sft.endless_batches(examples.train, chosen.batch, chosen.seed)
    held_out = sft.held_out_batches(examples, chosen.batch) if chosen.eval_every else None
    return sft.train(trainer, batches, held_out, chosen), trainer


def test_only_the_answer_and_its_end_are_marked(tokenizer):
    tokens, mask = sft.encode(tokenizer, "How many legs has a cat?", "4")

    answer = [token for token, marked in zip(tokens, mask, strict=True) if marked]
    prompt = [token for token, marked in zip(tokens, mask, strict=True) if not marked]
    assert tokenizer.decode(answer) == "4<|im_end|>"
    assert tokenizer.decode(prompt).endswith("cat?<|im_end|>\n<|im_start|>assistant\n")
    assert mask == sorted(mask)


def test_padding_stands_at_the_right_and_is_not_marked():
    example = sft.pad([5, 6, 7], [False, True, True], length=5, pad_id=0)

    assert example.input_tokens.tolist() == [5, 6, 7, 0, 0]
    assert example.input_mask.tolist() == [False, True, True, False, False]
    assert example.input_tokens.dtype == np.int32


def test_equal_seeds_give_equal_examples(tokenizer, examples):
    again = sft.make_examples(tokenizer, ["count_bits"], 24, length=64, seed=0)

    assert len(again.train) == len(examples.train) == 24
    for one, other in zip(again.train, examples.train, strict=True):
        np.testing.assert_array_equal(one.input_tokens, other.input_tokens)
        np.testing.assert_array_equal(one.input_mask, other.input_mask)


def test_neighbouring_seeds_share_no_question(tokenizer, examples):
    other = sft.make_examples(tokenizer, ["count_bits"], 24, length=64, seed=1)

    questions = [{example.input_tokens.tobytes() for example in e.train} for e in (examples, other)]
    assert questions[0].isdisjoint(questions[1])


def test_held_out_questions_are_not_trained_on(tokenizer):
    # Few questions of this kind exist, so chance alone repeats many of them.
    examples = sft.make_examples(tokenizer, ["coin_flip"], 300, length=80, seed=0)

    trained = {example.input_tokens.tobytes() for example in examples.train}
    assert examples.held_out
    assert trained.isdisjoint(example.input_tokens.tobytes() for example in examples.held_out)


def test_examples_that_do_not_fit_are_skipped_whole_and_counted(tokenizer):
    everything = sft.make_examples(tokenizer, ["chain_sum"], 40, length=512, seed=3)
    some = sft.make_examples(tokenizer, ["chain_sum"], 40, length=60, seed=3)

    assert everything.skipped == 0
    assert everything.total == some.total == 40 + sft.HELD_OUT
    assert 0 < some.skipped < some.total
    assert len(some.train) + len(some.held_out) + some.skipped == some.total
    for example in some.train:
        marked = example.input_tokens[example.input_mask]
        assert marked[-1] == tokenizer.eos_token_id


def test_each_task_contributes_an_equal_share(tokenizer):
    examples = sft.make_examples(tokenizer, ["count_bits", "lcm"], 10, length=96, seed=0)

    texts = [tokenizer.decode(example.input_tokens) for example in examples.train]
    assert sum("binary" in text for text in texts) == 5
    assert sum("Least Common Multiple" in text for text in texts) == 5


def test_length_that_fits_nothing_says_what_would(tokenizer):
    with pytest.raises(smollm2.ExampleError, match=r"--length 16 is too short.*take \d+ to \d+"):
        sft.make_examples(tokenizer, ["count_bits"], 8, length=16, seed=0)


def test_family_without_written_answers_is_refused(tokenizer):
    with pytest.raises(smollm2.ExampleError, match="--tasks boxnet has no written answers"):
        sft.make_examples(tokenizer, ["boxnet"], 8, length=4_096, seed=0)


def test_batches_are_seeded_and_each_epoch_has_its_own_order(examples):
    def two_epochs(seed):
        batches = itertools.islice(sft.endless_batches(examples.train, 8, seed), 6)
        return np.concatenate([batch.input_tokens for batch in batches])

    one, again, other = two_epochs(0), two_epochs(0), two_epochs(1)

    assert one.shape == (48, 64)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[:24], one[24:])
    assert sorted(map(bytes, one[:24])) == sorted(map(bytes, one[24:]))


def test_model_input_is_causal_and_counts_positions():
    batch = sft.pad([5, 6, 7], [False, True, True], length=4, pad_id=0)
    batch = jax.tree.map(lambda array: array[None], batch)

    arguments = sft.model_input(batch)

    assert arguments["positions"].tolist() == [[0, 1, 2, 3]]
    assert arguments["attention_mask"].tolist() == [np.tri(4, dtype=bool).tolist()]
    assert arguments["input_mask"].tolist() == [[False, True, True, False]]


def test_loss_is_the_mean_over_answer_tokens_alone():
    tokens = jnp.array([[1, 2, 3, 0], [3, 1, 0, 0]])
    mask = jnp.array([[False, False, True, False], [False, True, True, False]])
    logits = jax.random.normal(jax.random.key(0), (2, 4, 5))
    # Each answer token is predicted from the position before it.
    log_probabilities = jax.nn.log_softmax(logits)
    expected = -(
        log_probabilities[0, 1, 3] + log_probabilities[1, 0, 1] + log_probabilities[1, 1, 0]
    )

    def loss(logits):
        return sft.answer_loss(lambda *_: (logits, None), tokens, mask, tokens, mask)

    np.testing.assert_allclose(loss(logits), expected / 3, rtol=1e-6)
    elsewhere = logits.at[0, 0].set(9.0).at[:, 2:].set(-9.0)
    np.testing.assert_allclose(loss(elsewhere), loss(logits), rtol=1e-6)


def test_text_right_of_the_answer_changes_nothing(tiny_model, tiny_examples):
    batch = next(iter(sft.endless_batches(tiny_examples.train, 2, 0)))
    padding = np.cumsum(batch.input_mask[:, ::-1], axis=1)[:, ::-1] == 0
    scribbled = dataclasses.replace(
        batch, input_tokens=np.where(padding, 7, batch.input_tokens).astype(np.int32)
    )

    assert padding.any()
    before = sft.answer_loss(tiny_model, **sft.model_input(batch))
    after = sft.answer_loss(tiny_model, **sft.model_input(scribbled))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("losses", "mode", "text"),
    [
        ([4.0] * 4 + [9.0] * 12 + [1.0] * 4, "train", "4.000 -> 1.000, a fall of 75.0 %"),
        ([4.0] * 4 + [1.0] * 4, "train", "(mean of the first 4 and last 4 of 8 updates)"),
        ([2.0, 1.0, 1.0], "train", "a fall of 50.0 % (first and last of 3 updates)"),
        ([2.0], "train", "2.000 -> 2.000, a fall of 0.0 % (first and last of 1 update)"),
        ([1.0, 2.0], "train", "a fall of -100.0 %"),
        ([3.0] + [2.0] * 8 + [1.5], "eval", "3.000 -> 1.500, a fall of 50.0 % (first and last of"),
    ],
)
def test_fall_of_the_loss_is_told_in_words(losses, mode, text):
    assert text in sft.describe_fall(losses, mode)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_logs_one_loss_and_learning_rate_an_update(
    tiny_model, tiny_examples, capsys, accumulation
):
    chosen = flags("--steps", "3", "--accumulation", str(accumulation), "--learning-rate", "0.02")

    code, trainer = train(tiny_model, tiny_examples, chosen)

    assert code == 0
    assert trainer.train_steps == 3
    assert trainer.iter_steps == 3 * accumulation
    assert len(trainer.metrics_logger.get_metric_history("", "loss", "train")) == 3
    rates = trainer.metrics_logger.get_metric_history("", "learning_rate", "train")
    np.testing.assert_allclose(rates, [0.02] * 3, rtol=1e-6)
    printed = capsys.readouterr().out
    assert "Trained 3 updates in" in printed
    assert "Training loss: " in printed
    assert "Held-out loss" not in printed


def test_evaluation_runs_before_training_and_every_n_updates(tiny_model, tiny_examples, capsys):
    _, trainer = train(tiny_model, tiny_examples, flags("--steps", "4", "--eval-every", "2"))

    assert len(trainer.metrics_logger.get_metric_history("", "loss", "eval")) == 3
    assert "(first and last of 3 evaluations)" in capsys.readouterr().out


def test_evaluation_without_held_out_questions_is_refused(examples):
    with pytest.raises(smollm2.ExampleError, match="Lower --questions"):
        sft.held_out_batches(dataclasses.replace(examples, held_out=[]), batch=4)


def test_held_out_batches_are_all_of_one_shape(examples):
    for batch in (5, 1_000):
        shapes = {item.input_tokens.shape for item in sft.held_out_batches(examples, batch)}

        assert shapes == {(min(batch, len(examples.held_out)), 64)}


def test_checkpoints_are_written_and_resumed_from(tiny_model, tiny_examples, tmp_path, capsys):
    folder = tmp_path / "deep" / "checkpoints"
    both = ("--checkpoint-dir", str(folder), "--checkpoint-every", "2")
    train(tiny_model, tiny_examples, flags("--steps", "3", *both))
    assert f"Checkpoints: {folder}" in capsys.readouterr().out
    assert {"2", "3"} <= {path.name for path in folder.iterdir()}

    _, trainer = train(tiny_model, tiny_examples, flags("--steps", "5", *both))

    printed = capsys.readouterr().out
    assert "Training: updates 4 to 5" in printed
    assert "Trained 2 updates" in printed
    assert trainer.train_steps == 5


def test_interrupt_reports_what_was_done_and_exits_with_130(
    tiny_model, tiny_examples, tmp_path, capsys
):
    def batches():
        yield from itertools.islice(sft.endless_batches(tiny_examples.train, 4, 0), 3)
        raise KeyboardInterrupt

    chosen = flags("--checkpoint-dir", str(tmp_path), "--checkpoint-every", "1")

    assert sft.train(sft.make_trainer(tiny_model, chosen), batches(), None, chosen) == 130

    printed = capsys.readouterr().out
    assert "Stopped by Ctrl-C after 3 updates" in printed
    assert "Training loss: " in printed
    assert (tmp_path / "3").is_dir()


def test_nothing_left_to_train_says_so(monkeypatch, tiny_model, tiny_examples, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "load_tokenizer", lambda cache_dir: None)
    monkeypatch.setattr(sft, "make_examples", lambda *_, **__: tiny_examples)
    monkeypatch.setattr(smollm2, "load_model", lambda cache_dir: tiny_model)
    monkeypatch.setattr(sft, "add_lora", lambda model, *_: model)
    chosen = flags("--steps", "1", "--checkpoint-dir", str(tmp_path))

    assert sft.run(chosen) == 0
    assert "Training loss" in capsys.readouterr().out
    assert sft.run(chosen) == 0
    assert f"{tmp_path} already holds update 1: nothing left" in capsys.readouterr().out


def test_installed_tunix_is_named_with_its_version():
    assert sft.tunix_release().split()[0] in {"google-tunix", "tunix-core"}


def test_interrupt_before_training_exits_with_130(monkeypatch, capsys):
    def interrupt(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "run", interrupt)
    monkeypatch.setattr(sys, "argv", ["sft_smollm2.py"])
    with pytest.raises(SystemExit) as caught:
        sft.main()

    assert caught.value.code == 130
    assert "before training began" in capsys.readouterr().out


def test_problem_that_the_user_can_solve_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["sft_smollm2.py"])
    with pytest.raises(SystemExit) as caught:
        sft.main()

    assert str(caught.value).startswith("error: The weights of SmolLM2-135M are not installed.")


@pytest.mark.slow
def test_real_model_trains_as_a_program_and_compiles_its_step_once(tmp_path):
    result = subprocess.run(
        [sys.executable, str(Path(sft.__file__)), "--steps", "3", "--questions", "32"],
        cwd=tmp_path,
        env={**os.environ, "JAX_LOG_COMPILES": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )

    assert result.returncode == 0, result.stderr
    assert "Trained 3 updates" in result.stdout
    assert "Training loss: " in result.stdout
    assert result.stderr.count("Finished XLA compilation of jit(_train_step)") == 1
