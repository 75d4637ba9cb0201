# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""One face for tokenizers of Hugging Face, of sentencepiece, and for others."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunix.generate.tokenizer_adapter import Tokenizer, TokenizerAdapter

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SAYS_HI = [{"role": "user", "content": "hi"}]


class Letters:
    """A tokenizer of the third kind: a letter is its code, 1 and 2 begin and end a text."""

    def encode(self, text: str, *, upper: bool = False) -> list[int]:
        return [ord(letter) for letter in (text.upper() if upper else text)]

    def decode(self, ids: list[int]) -> str:
        assert all(type(token) is int for token in ids)
        return "".join(map(chr, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0

    def greet(self) -> str:
        return "hello"


@pytest.fixture
def hugging_face() -> Any:
    """Words as tokens; `<s>` and `</s>` are special, there is no padding token."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "</s>", "hi", "there", "user", "assistant"]
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def train(path: Path, **options: Any) -> Path:
    """Trains a sentencepiece model of single letters."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    text = ["hi there you all", "who is it, what is it", "a quick brown fox jumps over lazy dogs"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 10),
        model_writer=model,
        vocab_size=40,
        model_type="char",
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture
def gemma_like(tmp_path: Path) -> Path:
    return train(
        tmp_path / "gemma.model",
        pad_id=3,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
    )


def test_hugging_face_tokenizer_is_used_as_it_is(hugging_face):
    adapter = TokenizerAdapter(hugging_face)

    assert adapter.encode("hi there") == [3, 4]
    assert adapter.decode(np.array([3, 4])) == "hi there"
    assert (adapter.bos_id(), adapter.eos_id()) == (1, 2)
    assert adapter.tokenizer is hugging_face
    assert adapter.decode([1, 3], skip_special_tokens=True) == "hi"


def test_missing_padding_token_is_the_eos_token_and_the_tokenizer_stays_as_it_was(hugging_face):
    assert TokenizerAdapter(hugging_face).pad_id() == 2
    assert hugging_face.pad_token_id is None


def test_padding_token_is_used_where_there_is_one(hugging_face):
    hugging_face.pad_token = "<unk>"

    assert TokenizerAdapter(hugging_face).pad_id() == 0


def test_missing_bos_token_is_none_and_missing_eos_token_an_error(hugging_face):
    hugging_face.bos_token = hugging_face.eos_token = None
    adapter = TokenizerAdapter(hugging_face)

    assert adapter.bos_id() is None
    for asked in (adapter.eos_id, adapter.pad_id):
        with pytest.raises(ValueError, match=r"has no EOS token, .*: set its eos_token"):
            asked()


def test_sentencepiece_model_is_used_as_it_is(gemma_like):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(gemma_like))
    adapter = TokenizerAdapter(processor)

    assert adapter.encode("hi") == processor.encode("hi")
    assert adapter.decode(np.array(adapter.encode("hi there"))) == "hi there"
    assert (adapter.bos_id(), adapter.eos_id(), adapter.pad_id()) == (1, 2, 3)


def test_sentencepiece_model_without_special_tokens_says_so(tmp_path):
    path = train(tmp_path / "bare.model", bos_id=-1, eos_id=-1)
    tokenizer = Tokenizer("sentencepiece", str(path), add_bos=False, add_eos=False)

    assert tokenizer.bos_id() is None
    with pytest.raises(ValueError, match="has no padding token"):
        tokenizer.pad_id()
    with pytest.raises(ValueError, match="has no EOS token"):
        tokenizer.eos_id()
    assert tokenizer.tokenize("hi", add_eos=False).tolist() == tokenizer.encode("hi")


def test_any_object_with_the_five_methods_is_a_tokenizer():
    adapter = TokenizerAdapter(Letters())

    assert adapter.encode("ab", upper=True) == [65, 66]
    assert adapter.decode(np.array([97, 98])) == "ab"
    assert (adapter.bos_id(), adapter.eos_id(), adapter.pad_id()) == (1, 2, 0)


def test_adapter_can_be_adapted_again():
    assert TokenizerAdapter(TokenizerAdapter(Letters())).encode("a") == [97]


def test_object_without_the_methods_is_refused_with_their_names():
    with pytest.raises(ValueError, match=r"dict cannot be .* has no encode, decode, bos_id"):
        TokenizerAdapter({})


def test_other_attributes_are_those_of_the_wrapped_tokenizer(hugging_face):
    assert TokenizerAdapter(Letters()).greet() == "hello"
    assert TokenizerAdapter(hugging_face).bos_token == "<s>"
    with pytest.raises(AttributeError, match="nothing"):
        TokenizerAdapter(Letters()).nothing  # noqa: B018


@pytest.mark.parametrize("copied", [copy.copy, lambda a: pickle.loads(pickle.dumps(a))])
def test_adapter_can_be_copied_and_pickled(copied):
    assert copied(TokenizerAdapter(Letters())).encode("a") == [97]


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([1, 1, 1, 5, 1, 1], [1, 5, 1, 1]),
        ([1, 5], [1, 5]),
        ([5, 5], [5, 5]),
        ([1, 1], [1]),
        ([], []),
    ],
)
def test_one_bos_token_in_front_is_enough(ids, wanted):
    assert TokenizerAdapter(Letters()).dedup_bos_ids(ids) == wanted


def test_chat_is_written_with_the_template_of_the_tokenizer(hugging_face):
    adapter = TokenizerAdapter(hugging_face)

    assert adapter.apply_chat_template(SAYS_HI) == "<s>user\nhi</s>\n<s>assistant\n"
    assert adapter.apply_chat_template(SAYS_HI, add_generation_prompt=False) == "<s>user\nhi</s>\n"
    assert adapter.apply_chat_template(SAYS_HI, tokenize=True) == [1, 5, 3, 2, 1, 6]


@pytest.mark.parametrize("content", ["hi</s>", "<s>hi", "h</s>i", "<</s>/s>hi", "</<s>s>hi"])
def test_special_tokens_in_a_message_are_removed(hugging_face, content):
    message = {"role": "user", "content": content}

    text = TokenizerAdapter(hugging_face).apply_chat_template([message])

    assert text == "<s>user\nhi</s>\n<s>assistant\n"
    assert message["content"] == content


def test_sentencepiece_model_with_the_marks_of_gemma_writes_its_turns(gemma_like):
    tokenizer = Tokenizer("sentencepiece", str(gemma_like), add_bos=False, add_eos=False)
    chat = [*SAYS_HI, {"role": "assistant", "content": "yo<end_of_turn>"}]
    wanted = "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n"

    assert tokenizer.apply_chat_template(chat, add_generation_prompt=False) == wanted
    assert tokenizer.apply_chat_template(chat) == wanted + "<start_of_turn>model\n"
    assert tokenizer.apply_chat_template(chat, tokenize=True) == tokenizer.encode(
        wanted + "<start_of_turn>model\n"
    )
    with pytest.raises(ValueError, match="no role 'system', only user, model, assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])


def test_chat_without_a_template_is_refused(tmp_path):
    plain = Tokenizer("sentencepiece", str(train(tmp_path / "plain.model")))
    for tokenizer in (plain, TokenizerAdapter(Letters())):
        with pytest.raises(ValueError, match="has no chat template"):
            tokenizer.apply_chat_template(SAYS_HI)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_loaded_sentencepiece_model_frames_texts_as_asked(gemma_like, bos, eos):
    tokenizer = Tokenizer("sentencepiece", str(gemma_like), add_bos=bos, add_eos=eos)
    inner = Tokenizer("sentencepiece", str(gemma_like), add_bos=False, add_eos=False).encode("hi")

    assert tokenizer.encode("hi") == [1] * bos + inner + [2] * eos
    assert tokenizer.tokenize("hi").tolist() == [1, *inner, 2]
    assert tokenizer.tokenize("hi", add_eos=False).tolist() == [1, *inner]
    assert tokenizer.tokenize("i", prefix="h").tolist() == [1, *inner, 2]
    assert tokenizer.tokenize("h", suffix="i").dtype == np.int32


def test_loaded_hugging_face_tokenizer_frames_examples(hugging_face, tmp_path):
    hugging_face.save_pretrained(tmp_path)
    tokenizer = Tokenizer("huggingface", str(tmp_path), add_bos=False, add_eos=False)

    assert tokenizer.encode("hi there") == [3, 4]
    assert tokenizer.tokenize("hi", suffix=" there").tolist() == [1, 3, 4, 2]


def test_unknown_kind_of_tokenizer_is_refused():
    with pytest.raises(ValueError, match="'sentencepiece' or 'huggingface', got 'bpe'"):
        Tokenizer("bpe")


def test_sentencepiece_model_that_is_no_local_file_is_refused():
    with pytest.raises(FileNotFoundError, match=r"gs://.* is not a local file: download"):
        Tokenizer()


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("sentencepiece", "sentencepiece", "sentencepiece"),
        ("huggingface", "transformers", "huggingface"),
    ],
)
def test_missing_library_is_named_with_the_extra(monkeypatch, tmp_path, kind, module, extra):
    (tmp_path / "model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'tunix-core\[{extra}\]'"):
        Tokenizer(kind, str(tmp_path / "model"))


def test_adapter_imports_neither_library():
    code = (
        "import sys, tunix.generate.tokenizer_adapter;"
        "print([m for m in ('transformers', 'sentencepiece', 'jax') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "[]\n"
