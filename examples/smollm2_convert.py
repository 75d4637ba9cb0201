# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the GGUF file of SmolLM2-135M into safetensors and tokenizer files, the layout of a hub."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from tunix.models.llama3 import model as llama3

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class WrongModelError(Exception):
    """The GGUF file does not hold the tensors that the configuration asks for."""


def convert(gguf_path: Path, folder: Path, config: llama3.ModelConfig) -> None:
    """Writes weights, configuration and tokenizer of a GGUF file into an existing folder.

    Raises:
        WrongModelError: A tensor is missing, superfluous or of the wrong shape.
    """
    reader = GGUFReader(gguf_path)
    weights = {
        hugging_face_name(tensor.name): dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    check_shapes({name: weight.shape for name, weight in weights.items()}, expected_shapes(config))
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = restore_rope_rows(weight, config.num_heads)
        elif name.endswith("k_proj.weight"):
            weights[name] = restore_rope_rows(weight, config.num_kv_heads)
    # Rounding to half precision is far finer than the four bits a weight that the file stores.
    halves = {name: np.ascontiguousarray(weight, np.float16) for name, weight in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = build_tokenizer(reader)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(hugging_face_config(config, tokenizer), indent=2)
    )


def hugging_face_name(name: str) -> str:
    """Translates a tensor's GGUF name; an unknown name is returned as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, part = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.weight"
    return _TOP_LEVEL_NAMES.get(name, name)


def restore_rope_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Puts the output rows of a query or key projection back into Hugging Face order.

    GGUF keeps the two numbers that RoPE rotates together next to each other; the Hugging Face
    layout has all first ones in the first half of a head and all second ones in the other half.

    Args:
        weight: [heads * head_dim, embed_dim], pairs interleaved.
        heads: Number of heads in `weight`.

    Returns:
        [heads * head_dim, embed_dim], pairs split into halves.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def expected_shapes(config: llama3.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a Llama with tied embeddings, by Hugging Face name."""
    width, hidden = config.embed_dim, config.hidden_dim
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Compares the shapes of all weights by name.

    Raises:
        WrongModelError: They differ; the message names the first differences.
    """
    problems = [
        f"{name} is {found.get(name, 'missing')}, expected {expected.get(name, 'no such tensor')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if problems:
        first = "; ".join(problems[:3])
        raise WrongModelError(f"not SmolLM2-135M, {len(problems)} tensors differ ({first})")


def build_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Builds the byte-level BPE tokenizer, with its chat template, from GGUF metadata."""
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    vocabulary: list[str] = field("ggml.tokens")
    bpe = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[tuple(merge.split(" ")) for merge in field("ggml.merges")],
        )
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(vocabulary, field("ggml.token_type"), strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    end_of_text = vocabulary[field("ggml.unknown_token_id")]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=vocabulary[field("ggml.bos_token_id")],
        eos_token=vocabulary[field("ggml.eos_token_id")],
        unk_token=end_of_text,
        # The file pads with EOS, which also ends every turn of a chat. Tunix's sampler hides each
        # pad token it meets in a prompt, so padding gets the one token that no chat contains.
        pad_token=end_of_text,
        chat_template=field("chat_template"),
    )


def hugging_face_config(
    config: llama3.ModelConfig, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """Returns the content of `config.json`, with which other libraries can read the folder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 8_192,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.weight_tying,
        "vocab_size": config.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "torch_dtype": "float16",
    }
