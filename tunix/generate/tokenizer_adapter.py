# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""One face for the tokenizers of Hugging Face, of sentencepiece, and for others with their methods.

Neither library is imported to wrap a tokenizer that exists already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_METHODS = ("encode", "decode", "bos_id", "eos_id", "pad_id")
_TURN_START, _TURN_END = "<start_of_turn>", "<end_of_turn>"
_TURN_ROLES = {"user": "user", "model": "model", "assistant": "model"}


class TokenizerAdapter:
    """Wraps a tokenizer. What is not defined here is looked up in the wrapped one.

    Args:
        tokenizer: A Hugging Face tokenizer, a `SentencePieceProcessor`, or any object with the
            methods `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`.

    Raises:
        ValueError: The object is none of these.
    """

    def __init__(self, tokenizer: Any) -> None:
        # sentencepiece has all methods of the third kind, and is told apart by an old name of one.
        self._is_hugging_face = hasattr(tokenizer, "bos_token_id")
        self._is_sentencepiece = hasattr(tokenizer, "EncodeAsIds")
        missing = [name for name in _METHODS if not hasattr(tokenizer, name)]
        if missing and not self._is_hugging_face:
            raise ValueError(
                f"{type(tokenizer).__qualname__} cannot be used as a tokenizer: it has no "
                f"{', '.join(missing)}. Give a Hugging Face tokenizer, a SentencePieceProcessor, "
                f"or an object with the methods {', '.join(_METHODS)}."
            )
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # Asked for while a copy or a pickle is made.
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    @property
    def tokenizer(self) -> Any:
        """The wrapped tokenizer."""
        return self._tokenizer

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Returns the tokens of a text, with what the tokenizer puts around it by itself.

        Args:
            text: The text.
            **kwargs: For the tokenizer's own method.
        """
        return list(self._tokenizer.encode(text, **kwargs))

    def decode(self, ids: Iterable[int], **kwargs: Any) -> str:
        """Returns the text of tokens.

        Args:
            ids: Tokens; an array will do.
            **kwargs: For the tokenizer's own method.
        """
        return self._tokenizer.decode([int(token) for token in ids], **kwargs)

    def bos_id(self) -> int | None:
        """Returns the token that begins a text, None where the tokenizer has none."""
        return self._special("bos")

    def eos_id(self) -> int:
        """Returns the token that ends a text.

        Raises:
            ValueError: The tokenizer has none.
        """
        token = self._special("eos")
        if token is None:
            raise ValueError(
                f"{type(self._tokenizer).__qualname__} has no EOS token, without which no text "
                "ends: set its eos_token, or use the tokenizer of the model."
            )
        return token

    def pad_id(self) -> int:
        """Returns the token that fills rows up: the EOS token where Hugging Face has no other.

        Raises:
            ValueError: The tokenizer has none.
        """
        token = self._special("pad")
        if token is None and self._is_hugging_face:
            return self.eos_id()
        if token is None:
            raise ValueError(
                f"{type(self._tokenizer).__qualname__} has no padding token: use a tokenizer that "
                "was trained with one (sentencepiece: --pad_id)."
            )
        return token

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        """Returns the tokens with one BOS token in front where there were several.

        Chat templates and tokenizers both put one there.
        """
        bos = self.bos_id()
        surplus = 0
        while surplus + 1 < len(ids) and ids[surplus] == ids[surplus + 1] == bos:
            surplus += 1
        return ids[surplus:]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Returns a conversation in the form that the model was trained on.

        Special tokens inside a message are removed: what a user or a tool says must not be able to
        end its own turn. Tokenizers without a template of their own get Gemma's turns if their
        vocabulary has them.

        Args:
            messages: Turns, each with `role` and `content`.
            add_generation_prompt: Whether to begin the model's next turn.
            tokenize: Whether to return tokens instead of text.
            **kwargs: For the tokenizer's own template.

        Raises:
            ValueError: The tokenizer has no template, or the template no such role.
        """
        messages = [self._without_special_tokens(message) for message in messages]
        if hasattr(self._tokenizer, "apply_chat_template"):
            if tokenize and self._is_hugging_face:
                kwargs.setdefault("return_dict", False)
            return self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                **kwargs,
            )
        text = self._gemma_turns(messages) + f"{_TURN_START}model\n" * add_generation_prompt
        return self.encode(text) if tokenize else text

    def _special(self, kind: str) -> int | None:
        """Returns a special token; sentencepiece writes -1 for none."""
        if self._is_hugging_face:
            return getattr(self._tokenizer, f"{kind}_token_id")
        token = getattr(self._tokenizer, f"{kind}_id")()
        return None if token is None or token < 0 else token

    def _without_special_tokens(self, message: Mapping[str, str]) -> dict[str, str]:
        content = message.get("content")
        if not isinstance(content, str):  # A call of a tool, for example, has none.
            return dict(message)
        # Again and again, since what is left may have closed up to a special token.
        while found := [token for token in self._special_tokens() if token and token in content]:
            for token in found:
                content = content.replace(token, "")
        return {**message, "content": content}

    def _special_tokens(self) -> Sequence[str]:
        if self._is_hugging_face:
            return self._tokenizer.all_special_tokens
        return (_TURN_START, _TURN_END, "<bos>", "<eos>")

    def _gemma_turns(self, messages: Iterable[Mapping[str, str]]) -> str:
        vocabulary = self._tokenizer
        if not self._is_sentencepiece or vocabulary.piece_to_id(_TURN_START) == vocabulary.unk_id():
            raise ValueError(
                f"{type(self._tokenizer).__qualname__} has no chat template. Use the Hugging Face "
                "tokenizer of the model, or write the prompt as plain text."
            )
        turns = []
        for message in messages:
            role = _TURN_ROLES.get(message["role"])
            if role is None:
                raise ValueError(
                    f"Gemma's turns have no role {message['role']!r}, only "
                    f"{', '.join(_TURN_ROLES)}. Put that text into the first turn of the user."
                )
            turns.append(f"{_TURN_START}{role}\n{message['content']}{_TURN_END}\n")
        return "".join(turns)


class Tokenizer(TokenizerAdapter):
    """Loads a tokenizer.

    Args:
        tokenizer_type: `sentencepiece` or `huggingface`.
        tokenizer_path: A sentencepiece model file; or what `AutoTokenizer` of transformers accepts,
            a folder or the name of a repository. Files are local: the default only says which
            file Gemma users want.
        add_bos: Whether `encode` begins with a BOS token.
        add_eos: Whether `encode` ends with an EOS token.
        hf_access_token: For repositories of the hub that ask for one.

    Raises:
        FileNotFoundError: The sentencepiece model is not a local file.
        ImportError: The library of that type is not installed.
        ValueError: The type is another one.
    """

    def __init__(
        self,
        tokenizer_type: str = "sentencepiece",
        tokenizer_path: str = "gs://gemma-data/tokenizers/tokenizer_gemma2.model",
        add_bos: bool | None = True,
        add_eos: bool | None = True,
        hf_access_token: str | None = None,
    ) -> None:
        self.tokenizer_type = tokenizer_type
        if tokenizer_type == "sentencepiece":
            tokenizer = _load_sentencepiece(tokenizer_path, bool(add_bos), bool(add_eos))
        elif tokenizer_type == "huggingface":
            tokenizer = _load_hugging_face(
                tokenizer_path, bool(add_bos), bool(add_eos), hf_access_token
            )
        else:
            raise ValueError(
                f"tokenizer_type must be 'sentencepiece' or 'huggingface', got {tokenizer_type!r}"
            )
        super().__init__(tokenizer)

    def tokenize(
        self, example: str, prefix: str = "", suffix: str = "", add_eos: bool = True
    ) -> np.ndarray:
        """Returns the tokens of an example for training, shape [length], int32.

        They begin with the BOS token if there is one, whatever `add_bos` says.

        Args:
            example: The text.
            prefix: Text in front of it.
            suffix: Text behind it.
            add_eos: Whether the tokens end with the EOS token.
        """
        plain: dict[str, bool] = (
            {"add_bos": False, "add_eos": False}
            if self._is_sentencepiece
            else {"add_special_tokens": False}
        )
        bos = self.bos_id()
        tokens = [] if bos is None else [bos]
        tokens += self.encode(prefix + example + suffix, **plain)
        if add_eos:
            tokens.append(self.eos_id())
        return np.array(tokens, np.int32)


def _load_sentencepiece(path: str | os.PathLike[str], add_bos: bool, add_eos: bool) -> Any:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is not a local file: download the sentencepiece model and give its path."
        )
    try:
        import sentencepiece
    except ImportError as error:
        raise ImportError(
            "sentencepiece is not installed: pip install 'tunix-core[sentencepiece]'"
        ) from error
    return sentencepiece.SentencePieceProcessor(
        model_file=str(file), add_bos=add_bos, add_eos=add_eos
    )


def _load_hugging_face(
    path: str | os.PathLike[str], add_bos: bool, add_eos: bool, token: str | None
) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "transformers is not installed: pip install 'tunix-core[huggingface]'"
        ) from error
    return transformers.AutoTokenizer.from_pretrained(
        path, add_bos_token=add_bos, add_eos_token=add_eos, token=token
    )
