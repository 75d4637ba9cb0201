# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes `golden.json`: what the reference implementation, transformers on PyTorch, computes.

    pip install torch==2.13.0 "transformers<5.13" safetensors
    python tests/models/llama3/make_golden.py FOLDER

FOLDER is the converted SmolLM2-135M, the cache folder that `examples/smollm2.py` names.
Everything is computed in float32 on the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy_llama as toy
import transformers

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village between two rivers, there lived a",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34",
    "Water boils at 100 degrees Celsius at sea level. " * 20 + "At sea level, water boils at",
)
"""The last one is long: far positions tell rotary embeddings apart."""
QUESTION = "What is 7 + 5?"
NEW_TOKENS = 24
SAMPLED = 128  # Logits kept of each prompt, out of the vocabulary.


def rounded(values: Any) -> list[float]:
    """Seven digits, what float32 has."""
    return [float(f"{value:.7g}") for value in np.asarray(values, np.float64).ravel()]


def smollm2(folder: str) -> dict[str, Any]:
    """Logits behind the last token of each prompt, best tokens at each, and a greedy answer."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vocabulary = np.arange(0, model.config.vocab_size, model.config.vocab_size // SAMPLED)
    prompts = []
    for text in PROMPTS:
        tokens = tokenizer.encode(text)
        logits = model(torch.tensor([tokens])).logits[0]
        prompts.append(
            {
                "tokens": tokens,
                "best": logits.argmax(-1).tolist(),
                "largest": float(logits[-1].abs().max()),
                "last": rounded(logits[-1][vocabulary]),
            }
        )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer.encode(str(chat))
    generated = model.generate(
        torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    reply = generated[0, len(tokens) :].tolist()
    return {
        "vocabulary": vocabulary.tolist(),
        "prompts": prompts,
        "chat": {"tokens": tokens, "reply": reply, "text": tokenizer.decode(reply)},
    }


def small(*, tied: bool, scaled: bool) -> list[float]:
    """Logits at the last of 96 positions of the toy decoder."""
    sizes, scaling = toy.SIZES, toy.SCALING
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    if scaled:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_context"],
        }
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["embed_dim"],
        intermediate_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        rms_norm_eps=sizes["norm_eps"],
        rope_parameters=rope,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.tensor(value) for name, value in toy.tensors(tied=tied).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    return rounded(model(torch.tensor(toy.tokens(96), dtype=torch.int64)).logits[0, -1])


@torch.no_grad()
def main() -> None:
    """Writes the file."""
    golden = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "smollm2": smollm2(sys.argv[1]),
        "toy": small(tied=False, scaled=False),
        "toy_tied": small(tied=True, scaled=False),
        "toy_scaled": small(tied=False, scaled=True),
    }
    path = Path(__file__).with_name("golden.json")
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n", "utf-8")
    print(path, path.stat().st_size, "bytes;", golden["smollm2"]["chat"]["text"])


if __name__ == "__main__":
    main()
