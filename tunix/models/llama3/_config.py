# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of the Llama models: sizes, rotary embedding, recomputation, layout on a mesh."""

from __future__ import annotations

import dataclasses
import enum
from typing import Self

from tunix.models._sharding import Axis


class RematConfig(enum.Enum):
    """What is computed again in the backward pass instead of being kept in memory."""

    NONE = enum.auto()
    """Nothing."""
    BLOCK = enum.auto()
    """The inside of each attention and each feed-forward block."""
    DECODER = enum.auto()
    """Each decoder layer as a whole: least memory, most computation."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingConfig:
    """Mesh axes of each dimension of weights and activations.

    Letters: vocabulary, embedding (d), heads (n), size of a head (h), feed-forward (f), batch,
    time. Axes that a mesh does not have are ignored, see `tunix.models._sharding.fit`.
    """

    emb_vd: tuple[Axis, ...] = ("tp", "fsdp")
    emb_dv: tuple[Axis, ...] = ("fsdp", "tp")
    q_weight_dnh: tuple[Axis, ...] = ("fsdp", "tp", None)
    kv_weight_dnh: tuple[Axis, ...] = ("fsdp", "tp", None)
    o_weight_nhd: tuple[Axis, ...] = ("tp", None, "fsdp")
    ffw_weight_df: tuple[Axis, ...] = ("fsdp", "tp")
    ffw_weight_fd: tuple[Axis, ...] = ("tp", "fsdp")
    rms_norm_weight: tuple[Axis, ...] = ("tp",)
    act_btd: tuple[Axis, ...] = ("fsdp", None, "tp")
    act_btf: tuple[Axis, ...] = ("fsdp", None, "tp")
    act_btnh: tuple[Axis, ...] = ("fsdp", None, "tp", None)

    @classmethod
    def get_default_sharding(cls, is_sampling: bool = False) -> Self:
        """Returns the default layout; for sampling, weights are not split over `fsdp`.

        A sampler reads every weight for each token, and would gather split ones each time.
        """
        if not is_sampling:
            return cls()
        return cls(
            emb_vd=("tp", None),
            emb_dv=(None, "tp"),
            q_weight_dnh=(None, "tp", None),
            kv_weight_dnh=(None, "tp", None),
            o_weight_nhd=("tp", None, None),
            ffw_weight_df=(None, "tp"),
            ffw_weight_fd=("tp", None),
            act_btd=("fsdp", None, None),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3.1 and newer stretch rotary frequencies to reach longer contexts.

    Waves that turn less than `low_freq_factor` times within the original context become `factor`
    times slower, those with more than `high_freq_factor` turns stay, and in between the two are
    mixed.

    Attributes:
        factor: How many times slower the slow waves turn.
        low_freq_factor: Turns within the original context, below which a wave is slow.
        high_freq_factor: Turns from which a wave is left alone.
        original_context: Context length of the pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8_192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Figures of a decoder of the Llama family.

    Attributes:
        num_layers: Decoder layers.
        vocab_size: Tokens in the vocabulary.
        embed_dim: Width of the residual stream.
        hidden_dim: Width of the feed-forward blocks.
        num_heads: Query heads.
        head_dim: Size of a head, an even number.
        num_kv_heads: Key and value heads, a divisor of `num_heads`.
        rope_theta: Base of the rotary embedding.
        norm_eps: What RMSNorm adds to the mean square.
        shd_config: Mesh axes of weights and activations.
        weight_tying: Whether the output projection is the embedding.
        remat_config: What is computed again in the backward pass.
        rope_scaling: Stretching of the rotary frequencies; None: none.

    Raises:
        ValueError: A figure is not positive, or figures do not go together.
    """

    num_layers: int
    vocab_size: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    head_dim: int
    num_kv_heads: int
    rope_theta: int
    norm_eps: float
    shd_config: ShardingConfig = ShardingConfig()
    weight_tying: bool = False
    remat_config: RematConfig = RematConfig.NONE
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:9]:
            value = getattr(self, field.name)
            if value <= 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} heads and "
                f"{self.num_kv_heads} key and value heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @classmethod
    def smollm2_135m(cls) -> Self:
        """SmolLM2-135M, whose architecture is Llama's."""
        return cls(
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

    @classmethod
    def llama3p2_1b(cls) -> Self:
        """Llama 3.2 1B."""
        return cls(
            num_layers=16,
            embed_dim=2_048,
            hidden_dim=8_192,
            num_heads=32,
            head_dim=64,
            weight_tying=True,
            rope_scaling=RopeScaling(factor=32.0),
            **_LLAMA3,
        )

    @classmethod
    def llama3p2_1b_instruct(cls) -> Self:
        """Llama 3.2 1B Instruct."""
        return cls.llama3p2_1b()

    @classmethod
    def llama3p2_3b(cls) -> Self:
        """Llama 3.2 3B."""
        return cls(
            num_layers=28,
            embed_dim=3_072,
            hidden_dim=8_192,
            num_heads=24,
            head_dim=128,
            weight_tying=True,
            rope_scaling=RopeScaling(factor=32.0),
            **_LLAMA3,
        )

    @classmethod
    def llama3p2_3b_instruct(cls) -> Self:
        """Llama 3.2 3B Instruct."""
        return cls.llama3p2_3b()

    @classmethod
    def llama3p1_8b(cls) -> Self:
        """Llama 3.1 8B."""
        return cls(
            num_layers=32,
            embed_dim=4_096,
            hidden_dim=14_336,
            num_heads=32,
            head_dim=128,
            rope_scaling=RopeScaling(factor=8.0),
            **_LLAMA3,
        )

    @classmethod
    def llama3_70b(cls) -> Self:
        """Llama 3 70B."""
        return cls(
            num_layers=80,
            embed_dim=8_192,
            hidden_dim=28_672,
            num_heads=64,
            head_dim=128,
            **_LLAMA3,
        )

    @classmethod
    def llama3p1_70b(cls) -> Self:
        """Llama 3.1 70B: Llama 3 70B with stretched rotary frequencies."""
        return dataclasses.replace(cls.llama3_70b(), rope_scaling=RopeScaling(factor=8.0))

    @classmethod
    def llama3p1_405b(cls) -> Self:
        """Llama 3.1 405B."""
        return cls(
            num_layers=126,
            embed_dim=16_384,
            hidden_dim=53_248,
            num_heads=128,
            head_dim=128,
            rope_scaling=RopeScaling(factor=8.0),
            **_LLAMA3,
        )


_LLAMA3 = {"vocab_size": 128_256, "num_kv_heads": 8, "rope_theta": 500_000, "norm_eps": 1e-5}
"""What all Llama 3 models have in common."""
