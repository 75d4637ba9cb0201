# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning of SmolLM2-135M on generated questions, with whichever Tunix is installed.

The script holds no telemetry. Run it as it is, or under `opentelemetry-instrument` to watch it:

    python examples/sft_smollm2.py
    opentelemetry-instrument python examples/sft_smollm2.py --tasks gcd,lcm --eval-every 10
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
import reasoning_gym
from flax import nnx

import sft_flags
import smollm2
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerFast

HELD_OUT = 32  # Questions kept away from training, for --eval-every.
INTERRUPTED = 130  # What a shell reports for a program that Ctrl-C ended.


@dataclasses.dataclass(frozen=True)
class Examples:
    """Encoded questions and answers, each of the requested length.

    Attributes:
        train: What is trained on.
        held_out: Examples whose questions do not occur in `train`.
        skipped: How many examples were too long.
        total: How many examples were generated.
    """

    train: list[TrainingInput]
    held_out: list[TrainingInput]
    skipped: int
    total: int


def main() -> None:
    """Runs the example as a program."""
    try:
        sys.exit(run(sft_flags.parse(sys.argv[1:])))
    except smollm2.ExampleError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C before training began.")
        sys.exit(INTERRUPTED)


def run(flags: sft_flags.Flags) -> int:
    """Trains as the flags say and prints what came of it; returns the exit code."""
    print(f"Tunix: {tunix_release()}", flush=True)
    tokenizer = smollm2.load_tokenizer(flags.cache_dir)
    examples = make_examples(
        tokenizer, flags.tasks, flags.questions, length=flags.length, seed=flags.seed
    )
    print(
        f"Data: {len(examples.train)} examples of {', '.join(flags.tasks)}; skipped "
        f"{examples.skipped} of {examples.total} that do not fit into {flags.length} tokens.",
        flush=True,
    )
    batches = endless_batches(examples.train, flags.batch, flags.seed)
    held_out = held_out_batches(examples, flags.batch) if flags.eval_every else None
    model = add_lora(smollm2.load_model(flags.cache_dir), flags.rank, flags.alpha, flags.seed)
    print(f"Model: SmolLM2-135M, {describe_weights(model)}", flush=True)
    trainer = make_trainer(model, flags)
    if trainer.train_steps >= flags.steps:
        print(
            f"{flags.checkpoint_dir} already holds update {trainer.train_steps}: nothing left to "
            "train. Give more --steps or another --checkpoint-dir."
        )
        return 0
    return train(trainer, batches, held_out, flags)


def train(
    trainer: PeftTrainer,
    batches: Iterable[TrainingInput],
    held_out: Iterable[TrainingInput] | None,
    flags: sft_flags.Flags,
) -> int:
    """Trains to the end or to Ctrl-C, and prints the outcome; returns the exit code."""
    first = trainer.train_steps
    print(f"Training: updates {first + 1} to {flags.steps} ...", flush=True)
    start = time.perf_counter()
    interrupted = False
    try:
        trainer.train(batches, held_out)
    except KeyboardInterrupt:
        interrupted = True
        # Lets a checkpoint that is being written in the background become complete.
        trainer.checkpoint_manager.close()
    verb = "Stopped by Ctrl-C after" if interrupted else "Trained"
    seconds = time.perf_counter() - start
    print(f"{verb} {trainer.train_steps - first} updates in {seconds:.1f} s.")
    logger: Any = trainer.metrics_logger
    for name, mode in (("Training loss", "train"), ("Held-out loss", "eval")):
        if logger.metric_exists("", "loss", mode):
            losses = logger.get_metric_history("", "loss", mode)
            print(f"{name}: {describe_fall(np.asarray(losses).tolist(), mode)}")
    if flags.checkpoint_dir:
        print(f"Checkpoints: {flags.checkpoint_dir}")
    return INTERRUPTED if interrupted else 0


def describe_fall(losses: Sequence[float], mode: str = "train") -> str:
    """Says how far a loss fell, in words that name what is compared.

    Single training losses depend on which questions a batch holds; means of a few do so less.

    Args:
        losses: Losses in order, in nats a token.
        mode: `train` for one loss an update, `eval` for one loss an evaluation.
    """
    window = max(1, min(4, len(losses) // 2)) if mode == "train" else 1
    first, last = float(np.mean(losses[:window])), float(np.mean(losses[-window:]))
    unit = "update" if mode == "train" else "evaluation"
    of = f"mean of the first {window} and last {window}" if window > 1 else "first and last"
    return (
        f"{first:.3f} -> {last:.3f}, a fall of {100 * (1 - last / first):.1f} % "
        f"({of} of {len(losses)} {unit}{'s' if len(losses) > 1 else ''})"
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, question: str, answer: str
) -> tuple[list[int], list[bool]]:
    """Turns a question and its answer into the tokens of a chat.

    Returns:
        The tokens, and for each whether it belongs to the answer. The token that ends the turn
        does too, so that the model learns to stop.
    """
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt_tokens = tokenizer.encode(str(prompt))
    answer_tokens = tokenizer.encode(f"{answer}{tokenizer.eos_token}")
    mask = [False] * len(prompt_tokens) + [True] * len(answer_tokens)
    return prompt_tokens + answer_tokens, mask


def pad(tokens: list[int], mask: list[bool], length: int, pad_id: int) -> TrainingInput:
    """Pads one example on the right.

    Returns:
        `input_tokens` of shape [length], int32, and `input_mask` of shape [length], bool.
    """
    room = length - len(tokens)
    # flax's decorator hides the fields from type checkers.
    return TrainingInput(
        input_tokens=np.asarray(tokens + [pad_id] * room, np.int32),  # pyright: ignore[reportCallIssue]
        input_mask=np.asarray(mask + [False] * room, np.bool_),  # pyright: ignore[reportCallIssue]
    )


def make_examples(
    tokenizer: PreTrainedTokenizerFast, tasks: Sequence[str], count: int, *, length: int, seed: int
) -> Examples:
    """Generates and encodes questions; equal arguments give equal examples.

    An example longer than `length` is skipped and counted: cut, it would teach a wrong answer.

    Args:
        tokenizer: Encodes text; its chat template frames each question.
        tasks: Families of reasoning-gym; each contributes an equal share.
        count: Number of questions to generate for training.
        length: Tokens an example may have.
        seed: Chooses the questions.

    Raises:
        ExampleError: No example fits, or a family has no written answers.
    """
    pad_id: Any = tokenizer.pad_token_id
    train, held_out, lengths = [], [], []
    trained_questions = set()
    share, held_out_share = math.ceil(count / len(tasks)), math.ceil(HELD_OUT / len(tasks))
    for task in tasks:
        # Question i is drawn from seed + i: neighbouring seeds would share nearly all questions.
        dataset = reasoning_gym.create_dataset(
            task, size=share + held_out_share, seed=seed * 1_000_003
        )
        for index in range(share + held_out_share):
            item = dataset[index]
            question, answer = item["question"], item["answer"]
            if answer is None:
                raise smollm2.ExampleError(f"--tasks {task} has no written answers: leave it out.")
            tokens, mask = encode(tokenizer, question, answer)
            lengths.append(len(tokens))
            if len(tokens) > length:
                continue
            example = pad(tokens, mask, length, pad_id)
            if index < share:
                train.append(example)
                trained_questions.add(question)
            elif question not in trained_questions:
                held_out.append(example)
    if not train:
        raise smollm2.ExampleError(
            f"--length {length} is too short: the {len(lengths)} examples of {', '.join(tasks)} "
            f"take {min(lengths)} to {max(lengths)} tokens."
        )
    return Examples(train, held_out, sum(size > length for size in lengths), len(lengths))


def endless_batches(examples: Sequence[TrainingInput], batch: int, seed: int) -> grain.MapDataset:
    """Shuffles, repeats with a new order each epoch, and batches into [batch, length] arrays."""
    return grain.MapDataset.source(examples).shuffle(seed).repeat().batch(batch)


def held_out_batches(examples: Examples, batch: int) -> grain.MapDataset:
    """Batches the held-out examples, all of one shape so that evaluation compiles once.

    Raises:
        ExampleError: There are none.
    """
    if not examples.held_out:
        raise smollm2.ExampleError(
            "--eval-every needs questions that training does not see, and these --tasks have none "
            "left. Lower --questions or choose other --tasks."
        )
    source = grain.MapDataset.source(examples.held_out)
    return source.batch(min(batch, len(examples.held_out)), drop_remainder=True)


def model_input(batch: TrainingInput) -> dict[str, jax.typing.ArrayLike]:
    """Builds the arguments of `answer_loss`.

    Padding stands at the right end, where causal attention hides it from every real token. So
    positions and attention need no padding mask, and `input_mask` is free to mark the answer.
    """
    everything = jnp.ones_like(batch.input_tokens, dtype=jnp.bool_)
    return {
        "input_tokens": jnp.asarray(batch.input_tokens),
        "input_mask": jnp.asarray(batch.input_mask),
        "positions": utils.build_positions_from_mask(everything),
        "attention_mask": utils.make_causal_attn_mask(everything),
    }


def answer_loss(
    model: Any,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
) -> jax.Array:
    """Returns the mean cross-entropy of the answer tokens, in nats a token.

    Args:
        model: Maps tokens to logits of shape [batch, length, vocabulary].
        input_tokens: [batch, length].
        input_mask: [batch, length], true on answer tokens.
        positions: [batch, length].
        attention_mask: [batch, length, length].
    """
    logits, _ = model(input_tokens, positions, None, attention_mask)
    # The logits at one position predict the token at the next.
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_tokens[:, 1:])
    weights = input_mask[:, 1:]
    return jnp.sum(losses * weights) / jnp.sum(weights)


def add_lora(model: Any, rank: int, alpha: float, seed: int) -> Any:
    """Returns a copy of the model with adapters beside its query and value projections."""
    provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj)", rank=rank, alpha=alpha)
    model = qwix.apply_lora_to_model(
        model, provider, rngs=nnx.Rngs(seed), **model.get_model_input()
    )
    # google-tunix before 0.1.7 declares its Llama3 not to be a pytree. The class that qwix derives
    # from it is one, but knows of no parts until they are assigned as data.
    for name, part in list(vars(model).items()):
        if isinstance(part, nnx.Pytree):
            setattr(model, name, nnx.data(part))
    return model


def make_trainer(model: nnx.Module, flags: sft_flags.Flags) -> PeftTrainer:
    """Builds the trainer; it resumes by itself when the checkpoint folder holds a checkpoint."""
    # inject_hyperparams keeps the learning rate in the optimizer's state, where Tunix looks for it.
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=flags.learning_rate)
    config = TrainingConfig(
        max_steps=flags.steps,
        # Required, but without effect when there is no evaluation data.
        eval_every_n_steps=flags.eval_every or flags.steps,
        # None keeps the optimizer as it is; 1 would wrap it for nothing.
        gradient_accumulation_steps=flags.accumulation if flags.accumulation > 1 else None,
        checkpoint_root_directory=flags.checkpoint_dir,
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_interval_steps=flags.checkpoint_every, max_to_keep=3
        ),
    )
    trainer = PeftTrainer(model, optimizer, config)
    return trainer.with_gen_model_input_fn(model_input).with_loss_fn(answer_loss)


def describe_weights(model: nnx.Module) -> str:
    """Says how many weights are trained, and of how many."""
    trained = sum(weight.size for weight in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    total = sum(weight.size for weight in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return f"{trained:,} of {total:,} weights trained"


def tunix_release() -> str:
    """Names the installed distribution that provides the `tunix` package, with its version."""
    for name in ("google-tunix", "tunix-core"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not an installed distribution"


if __name__ == "__main__":
    main()
