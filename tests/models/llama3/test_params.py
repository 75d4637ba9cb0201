# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the decoder from and to safetensors."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import toy_llama
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from tunix.models import _safetensors
from tunix.models.llama3 import params
from tunix.models.llama3.model import Llama3, ModelConfig

CONFIG = ModelConfig(**toy_llama.SIZES)
TIED = dataclasses.replace(CONFIG, weight_tying=True)
Q = "model.layers.0.self_attn.q_proj.weight"


def weights_of(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {params.hugging_face_name(path): weight.get_value() for path, weight in flat}


def everything_in(folder: Any) -> dict[str, np.ndarray]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def same_bits(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 9_000, 1])
def test_written_weights_are_read_back_bit_for_bit(toy_folder, tmp_path, dtype, tied, shard_bytes):
    config = TIED if tied else CONFIG
    model = params.create_model_from_safe_tensors(toy_folder(tied=tied), config, dtype=dtype)

    params.save_model_as_safe_tensors(model, tmp_path / "new", max_shard_bytes=shard_bytes)
    again = params.create_model_from_safe_tensors(tmp_path / "new", config)

    same_bits(weights_of(again), weights_of(model))
    assert {w.dtype for w in weights_of(again).values()} == {jnp.dtype(dtype)}
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    if shard_bytes == 10**9:
        assert files == ["model.safetensors"]
    else:
        assert len(files) > 2
        assert files[-1] == "model.safetensors.index.json"
        assert files[0].startswith("model-00001-of-000")


def test_written_files_hold_the_tensors_that_the_model_came_from(toy_folder, tmp_path):
    folder = toy_folder()
    model = params.create_model_from_safe_tensors(folder, CONFIG)

    params.save_model_as_safe_tensors(model, tmp_path / "new")

    same_bits(everything_in(tmp_path / "new"), toy_llama.tensors(tied=False))


def test_weights_of_a_split_model_are_written_whole(toy_folder, tmp_path, mesh):
    model = params.create_model_from_safe_tensors(toy_folder(), CONFIG, mesh)

    params.save_model_as_safe_tensors(model, tmp_path / "new")

    same_bits(everything_in(tmp_path / "new"), toy_llama.tensors(tied=False))


def test_folder_with_weights_is_not_written_to(toy_folder):
    folder = toy_folder()
    model = params.create_model_from_safe_tensors(folder, CONFIG)
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists already: delete it"):
        params.save_model_as_safe_tensors(model, folder)


def test_adapters_are_merged_into_what_is_written(toy_folder, tmp_path):
    model = params.create_model_from_safe_tensors(toy_folder(), CONFIG)
    provider = qwix.LoraProvider(module_path=".*(q_proj|down_proj)", rank=2, alpha=3.0)
    inputs = model.get_model_input()
    adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **inputs)
    adapters = nnx.state(adapted, nnx.LoRAParam)
    nnx.update(adapted, jax.tree.map(lambda w: 0.2 * jnp.ones_like(w), adapters))

    with pytest.raises(ValueError, match="lora_alpha that they were made with"):
        params.save_model_as_safe_tensors(adapted, tmp_path / "new")
    params.save_model_as_safe_tensors(adapted, tmp_path / "new", lora_alpha=3.0)
    merged = params.create_model_from_safe_tensors(tmp_path / "new", CONFIG)

    wanted, plain = adapted(**inputs)[0], model(**inputs)[0]
    np.testing.assert_allclose(merged(**inputs)[0], wanted, atol=1e-4)
    assert jnp.abs(wanted - plain).max() > 0.1


def test_weights_that_a_checkpoint_has_no_place_for_are_not_written(tmp_path):
    model = Llama3(CONFIG, rngs=nnx.Rngs(0))
    model.extra = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"differs from the model in extra\.weight\. Write the model as"
    ):
        params.save_model_as_safe_tensors(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_are_split_over_the_mesh(toy_folder, mesh):
    model = params.create_model_from_safe_tensors(toy_folder(), CONFIG, mesh)
    weights = weights_of(model)

    assert weights[Q].sharding.spec == P("fsdp", "tp")
    for name, weight in weights.items():
        part = weight.addressable_shards[0].data.size
        assert part * (4 if weight.ndim == 2 else 2) == weight.size, name


def test_mesh_with_explicit_axes_is_refused_with_the_remedy(toy_folder):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match=r"automatic axes.*jax\.sharding\.Mesh"):
        params.create_model_from_safe_tensors(toy_folder(), CONFIG, mesh)


def test_without_a_mesh_weights_are_not_committed_to_a_device(toy_folder):
    """A step that mixes committed with uncommitted arrays is compiled twice."""
    model = params.create_model_from_safe_tensors(toy_folder(), CONFIG)

    assert not any(weight.committed for weight in weights_of(model).values())


def test_one_tensor_at_a_time_is_in_memory(toy_folder, monkeypatch):
    alive: set[int] = set()
    most = 0
    read = _safetensors.Checkpoint.read

    def counted(self: Any, name: str) -> np.ndarray:
        nonlocal most
        value = read(self, name)
        most = max(most, len(alive) + 1)
        alive.add(id(value))
        weakref.finalize(value, alive.discard, id(value))
        return value

    monkeypatch.setattr(_safetensors.Checkpoint, "read", counted)
    params.create_model_from_safe_tensors(toy_folder(), CONFIG, dtype=jnp.bfloat16)

    assert most == 1


WRONG = {
    "missing": ({Q: None}, rf"{Q} is missing, the configuration asks for \(48, 24\)"),
    "unexpected": (
        {"model.layers.2.mlp.up_proj.weight": np.zeros((40, 24), np.float32)},
        r"layers\.2\.mlp\.up_proj\.weight has shape \(40, 24\), .* asks for no such tensor",
    ),
    "shape": (
        {Q: np.zeros((24, 48), np.float32)},
        rf"{Q} has shape \(24, 48\), the configuration asks for \(48, 24\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensor_is_named_with_both_shapes_before_any_is_read(
    toy_folder, monkeypatch, changes, message
):
    def read(self: Any, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(_safetensors.Checkpoint, "read", read)
    folder = toy_folder(changes)
    with pytest.raises(ValueError, match=message) as caught:
        params.create_model_from_safe_tensors(folder, CONFIG)
    assert str(folder) in str(caught.value)
    assert "Choose the ModelConfig of this checkpoint" in str(caught.value)


def test_many_wrong_tensors_are_counted(toy_folder):
    config = dataclasses.replace(CONFIG, embed_dim=32)
    with pytest.raises(ValueError, match="; and 16 more") as caught:
        params.create_model_from_safe_tensors(toy_folder(), config)
    assert str(caught.value).count("asks for") == 5


def test_quantised_tensor_is_refused(toy_folder):
    folder = toy_folder({Q: np.zeros((48, 24), np.int8)})
    with pytest.raises(ValueError, match=rf"{Q} in .* has dtype I8: quantised"):
        params.create_model_from_safe_tensors(folder, CONFIG)


def test_unknown_mode_is_refused(toy_folder):
    with pytest.raises(ValueError, match="auto, optimized, original, got 'fast'"):
        params.create_model_from_safe_tensors(toy_folder(), CONFIG, mode="fast")


def test_tensors_that_follow_from_others_are_passed_over(toy_folder):
    table = toy_llama.tensors(tied=True)["model.embed_tokens.weight"]
    folder = toy_folder(
        {
            "lm_head.weight": table.copy(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        },
        tied=True,
    )

    model = params.create_model_from_safe_tensors(folder, TIED)

    same_bits(
        {n: w.T if n.endswith("proj.weight") else w for n, w in weights_of(model).items()},
        toy_llama.tensors(tied=True),
    )


def test_output_projection_of_its_own_is_not_passed_over(toy_folder):
    with pytest.raises(ValueError, match=r"differs from .*weight_tying=False"):
        params.create_model_from_safe_tensors(toy_folder(tied=False), TIED)
