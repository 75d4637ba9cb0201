# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The Llama decoder: right numbers, cache, recomputation, adapters, layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import toy_llama
from flax import nnx
from jax.sharding import PartitionSpec as P

from tunix.models.llama3 import params
from tunix.models.llama3.model import (
    Llama3,
    ModelConfig,
    RematConfig,
    RopeScaling,
    ShardingConfig,
)

CONFIG = ModelConfig(**toy_llama.SIZES)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make(**changes: Any) -> Llama3:
    return Llama3(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(params=0))


def causal(rows: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))


@nnx.jit
def call(model: Llama3, *args: Any) -> Any:
    return model(*args)


@nnx.jit
def logits_of(model: Llama3, tokens: Any) -> jax.Array:
    tokens = jnp.asarray(tokens)
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    return model(tokens, positions, None, causal(rows, length))[0]


def loss(model: Llama3) -> jax.Array:
    return jnp.mean(jnp.square(logits_of(model, toy_llama.tokens(6, rows=2))))


@pytest.mark.parametrize(
    ("reference", "changes"),
    [
        ("toy", {}),
        ("toy_tied", {"weight_tying": True}),
        ("toy_scaled", {"rope_scaling": RopeScaling(**toy_llama.SCALING)}),
    ],
)
def test_logits_are_those_of_transformers(toy_folder, golden, reference, changes):
    config = dataclasses.replace(CONFIG, **changes)
    folder = toy_folder(tied=config.weight_tying)
    model = params.create_model_from_safe_tensors(folder, config)

    last = logits_of(model, toy_llama.tokens(96))[0, -1]

    np.testing.assert_allclose(last, golden[reference], rtol=0, atol=2e-5)


def test_stretched_rotary_embedding_makes_a_difference(golden):
    assert np.abs(np.subtract(golden["toy"], golden["toy_scaled"])).max() > 0.1


def test_later_tokens_do_not_change_earlier_logits():
    model = make()
    tokens = toy_llama.tokens(8)
    changed = tokens.copy()
    changed[0, 5] += 1

    before, after = logits_of(model, tokens), logits_of(model, changed)

    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert np.abs(before[0, 5:] - after[0, 5:]).min(axis=-1).max() > 0


def test_padding_on_the_left_changes_nothing_but_the_place():
    model = make()
    tokens = jnp.asarray(toy_llama.tokens(6))
    padded = jnp.pad(tokens, ((0, 0), (3, 0)))
    real = jnp.arange(9) >= 3
    positions = jnp.maximum(jnp.arange(9) - 3, 0)[None]

    logits, _ = call(model, padded, positions, None, causal(1, 9) & real)

    np.testing.assert_allclose(logits[0, 3:], logits_of(model, tokens)[0], atol=1e-5)


@pytest.mark.parametrize("chunks", [(5, 1, 1, 1), (1,) * 8, (8,), (3, 4, 1)])
def test_tokens_through_the_cache_give_the_logits_of_one_call(chunks):
    model = make()
    tokens = jnp.asarray(toy_llama.tokens(8, rows=2))
    cache = model.init_cache(batch_size=2, cache_size=11)
    found, done = [], 0
    for size in chunks:
        positions = jnp.broadcast_to(done + jnp.arange(size), (2, size))
        mask = jnp.arange(11) <= positions[..., None]
        logits, cache = call(model, tokens[:, done : done + size], positions, cache, mask)
        found.append(logits)
        done += size

    np.testing.assert_allclose(jnp.concatenate(found, 1), logits_of(model, tokens), atol=1e-5)
    assert cache["layer_1"]["end_index"].tolist() == [8, 8]


def test_cache_keeps_its_dtype_and_layout():
    model = make()
    cache = model.init_cache(2, 7, jnp.bfloat16)
    tokens = jnp.asarray(toy_llama.tokens(3, rows=2))
    positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
    mask = jnp.arange(7) <= positions[..., None]

    logits, new = call(model, tokens, positions, cache, mask)

    assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(
        lambda a: (a.shape, a.dtype), cache
    )
    assert (new["layer_0"]["k"].shape, new["layer_0"]["k"].dtype) == ((2, 7, 2, 8), jnp.bfloat16)
    assert logits.dtype == jnp.float32


def test_call_with_more_tokens_than_the_cache_has_places_is_refused():
    model = make()
    with pytest.raises(ValueError, match="4 places, but the call has 5 tokens"):
        model(jnp.zeros((1, 5), int), jnp.zeros((1, 5), int), model.init_cache(1, 4), causal(1, 5))


def test_half_precision_weights_give_logits_of_their_dtype_near_the_exact_ones():
    model = make()
    exact = logits_of(model, toy_llama.tokens(6))
    nnx.update(model, jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(model)))

    half = logits_of(model, toy_llama.tokens(6))

    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=0.03 * jnp.abs(exact).max())


@pytest.mark.parametrize(
    ("remat", "regions"),
    [
        (RematConfig.NONE, 0),
        (RematConfig.BLOCK, 4),
        (RematConfig.DECODER, 2),
        (RematConfig.DECODER.value, 2),
    ],
)
def test_recomputation_has_its_regions_and_leaves_gradients_alone(remat, regions):
    plain, model = make(), make(remat_config=remat)

    def flat_loss(state: Any) -> jax.Array:
        return loss(nnx.merge(nnx.graphdef(model), state))

    jaxpr = str(jax.make_jaxpr(flat_loss)(nnx.state(model)))
    gradient = nnx.jit(nnx.grad(loss))
    wanted, found = gradient(plain), gradient(model)

    assert jaxpr.count("= checkpoint[") + jaxpr.count("= remat2[") == regions
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), wanted, found)


@pytest.mark.parametrize("remat", list(RematConfig))
def test_lora_adapters_start_without_effect_and_learn(remat):
    model = make(remat_config=remat)
    provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj)", rank=2, alpha=4.0)
    adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())
    before = logits_of(model, toy_llama.tokens(6))

    gradient = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))(adapted)

    np.testing.assert_allclose(logits_of(adapted, toy_llama.tokens(6)), before, atol=1e-6)
    flat = {".".join(map(str, path)): w for path, w in nnx.to_flat_state(gradient)}
    assert len(flat) == 2 * 2 * 2  # layers, projections, a and b
    for path, weight in flat.items():
        # b starts as zero: a learns from the second step on.
        assert bool(jnp.any(weight.get_value())) == path.endswith("lora_b"), path


def test_each_projection_is_found_by_its_name():
    model = make()
    provider = qwix.LoraProvider(module_path=f".*({'|'.join(PROJECTIONS)})", rank=2, alpha=2.0)
    adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())

    paths = [path for path, _ in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam))]

    for name in PROJECTIONS:
        assert [path[:4:3] for path in paths].count(("layers", name)) == 2 * CONFIG.num_layers


@pytest.mark.parametrize(
    ("preset", "weights"),
    [
        ("smollm2_135m", 134_515_008),
        ("llama3p2_1b", 1_235_814_400),
        ("llama3p2_1b_instruct", 1_235_814_400),
        ("llama3p2_3b", 3_212_749_824),
        ("llama3p2_3b_instruct", 3_212_749_824),
        ("llama3p1_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3p1_70b", 70_553_706_496),
        ("llama3p1_405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_weights(preset, weights):
    model = Llama3(getattr(ModelConfig, preset)(), rngs=None)

    assert sum(math.prod(w.shape) for _, w in nnx.to_flat_state(nnx.state(model))) == weights


def test_preset_of_smollm2_is_what_the_example_uses():
    smollm2 = pytest.importorskip("smollm2", reason="the examples' requirements are missing")

    assert ModelConfig.smollm2_135m() == smollm2.model_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"norm_eps": -1e-5}, "norm_eps must be positive, got -1e-05"),
        ({"num_kv_heads": 4}, "6 heads and 4 key and value heads"),
        ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
    ],
)
def test_impossible_figures_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def specs_of(config: ModelConfig) -> dict[str, P]:
    state = nnx.get_partition_spec(nnx.state(Llama3(config, rngs=None)))
    return {
        params.hugging_face_name(path): spec.get_value() for path, spec in nnx.to_flat_state(state)
    }


def test_weights_carry_their_mesh_axes():
    specs = specs_of(CONFIG)

    assert specs["model.embed_tokens.weight"] == P("tp", "fsdp")
    assert specs["lm_head.weight"] == P("fsdp", "tp")
    assert specs["model.norm.weight"] == P("tp")
    layer = {name.split(".")[-2]: spec for name, spec in specs.items() if ".layers.1." in name}
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert layer[name] == P("fsdp", "tp"), name
    for name in ("o_proj", "down_proj"):
        assert layer[name] == P("tp", "fsdp"), name


def test_layout_can_be_replaced():
    layout = dataclasses.replace(
        ShardingConfig.get_default_sharding(is_sampling=True),
        q_weight_dnh=("data", "model", "tp"),
        o_weight_nhd=(None, None, "model"),
    )
    specs = specs_of(dataclasses.replace(CONFIG, shd_config=layout))

    assert specs["model.layers.0.self_attn.q_proj.weight"] == P("data", ("model", "tp"))
    assert specs["model.layers.0.self_attn.o_proj.weight"] == P(None, "model")
    assert specs["model.layers.0.mlp.up_proj.weight"] == P(None, "tp")


@pytest.mark.parametrize("rows", [1, 4])
def test_four_devices_compute_what_one_does(toy_folder, mesh, rows):
    """A batch of one cannot be split over two; two key heads and six query heads can."""
    folder = toy_folder()
    alone = params.create_model_from_safe_tensors(folder, CONFIG)
    split = params.create_model_from_safe_tensors(folder, CONFIG, mesh)
    tokens = toy_llama.tokens(12, rows)
    wanted = logits_of(alone, tokens)

    with jax.set_mesh(mesh):
        found = logits_of(split, tokens)
        cache = split.init_cache(4, 16)

    np.testing.assert_allclose(found, wanted, atol=1e-4)
    np.testing.assert_allclose(logits_of(split, tokens), wanted, atol=1e-4)
    assert cache["layer_0"]["k"].sharding.spec == P("fsdp", None, "tp", None)


def test_adapters_of_a_split_model_are_split_with_it(toy_folder, mesh):
    model = params.create_model_from_safe_tensors(toy_folder(), CONFIG, mesh)
    provider = qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=2.0)
    adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())

    projection = adapted.layers[0].attn.q_proj

    assert projection.kernel_lora_a.get_value().sharding.spec == P("fsdp", None)
    assert projection.kernel_lora_b.get_value().sharding.spec == P(None, "tp")
