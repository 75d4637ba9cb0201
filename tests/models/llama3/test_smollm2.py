# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder with real weights, those of SmolLM2-135M, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix.models.llama3 import params
from tunix.models.llama3.model import Llama3, ModelConfig

# Converting the weights, loading them and compiling thirty layers takes about a minute.
pytestmark = pytest.mark.slow

BOUND = 1e-3  # Of the largest logit.


@pytest.fixture(scope="module")
def folder() -> Path:
    smollm2 = pytest.importorskip("smollm2", reason="needs the requirements of the examples")
    try:
        return smollm2.prepare()
    except smollm2.ExampleError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama3:
    return params.create_model_from_safe_tensors(
        folder, ModelConfig.smollm2_135m(), dtype=jnp.float32
    )


@nnx.jit
def logits_of(model: Llama3, tokens: jax.Array) -> jax.Array:
    rows, length = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return model(tokens, jnp.broadcast_to(jnp.arange(length), tokens.shape), None, mask)[0]


@nnx.jit
def next_token(model: Llama3, tokens: jax.Array, start: Any, cache: Any) -> Any:
    positions = start + jnp.arange(tokens.shape[1])[None]
    mask = jnp.arange(cache["layer_0"]["k"].shape[1]) <= positions[..., None]
    logits, cache = model(tokens, positions, cache, mask)
    return jnp.argmax(logits[0, -1]), cache


@pytest.mark.parametrize("index", range(5))
def test_logits_are_those_of_transformers(model, golden, index):
    reference = golden["smollm2"]
    prompt = reference["prompts"][index]

    logits = logits_of(model, jnp.asarray([prompt["tokens"]]))[0]

    error = np.abs(logits[-1, np.array(reference["vocabulary"])] - np.array(prompt["last"]))
    assert error.max() <= BOUND * prompt["largest"]
    assert jnp.argmax(logits, axis=-1).tolist() == prompt["best"]


def test_greedy_answer_is_that_of_transformers_with_and_without_a_cache(model, golden):
    chat = golden["smollm2"]["chat"]
    assert "7 + 5 = 12" in chat["text"]
    asked, replied = len(chat["tokens"]), len(chat["reply"])
    size = asked + replied

    token, cache = next_token(model, jnp.asarray([chat["tokens"]]), 0, model.init_cache(1, size))
    cached = [int(token)]
    for place in range(asked, size - 1):
        token, cache = next_token(model, token[None, None], place, cache)
        cached.append(int(token))

    tokens = np.zeros((1, size), np.int32)
    tokens[0, :asked] = chat["tokens"]
    for place in range(asked, size):
        tokens[0, place] = jnp.argmax(logits_of(model, jnp.asarray(tokens))[0, place - 1])

    assert cached == chat["reply"]
    assert tokens[0, asked:].tolist() == chat["reply"]


def test_four_devices_compute_what_one_does(model, folder, golden, mesh):
    """Nine query heads and three key heads cannot be split over two devices; weights can."""
    split = params.create_model_from_safe_tensors(
        folder, ModelConfig.smollm2_135m(), mesh, jnp.float32
    )
    tokens = jnp.asarray([golden["smollm2"]["prompts"][1]["tokens"]] * 2)
    with jax.set_mesh(mesh):
        found = logits_of(split, tokens)

    np.testing.assert_allclose(found, logits_of(model, tokens), atol=1e-4)


def test_weights_are_written_and_read_back_bit_for_bit(model, tmp_path):
    params.save_model_as_safe_tensors(model, tmp_path / "new", max_shard_bytes=200_000_000)
    again = params.create_model_from_safe_tensors(tmp_path / "new", ModelConfig.smollm2_135m())

    assert len(list((tmp_path / "new").iterdir())) > 3
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(again))
