"""GPT-NeoX as a list of layers.

Letters: B = samples, T = tokens, D = width, H = heads, d = D / H, R = rotated channels of a head, V = vocabulary.

Source: Black et al. 2022, GPT-NeoX-20B, arXiv:2204.06745, section 2; Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayzero3.config import ModelSection

INIT_STD = 0.02


class Embedding(nn.Module):
    """Token ids (B, T) int64 -> hidden states (B, T, D)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Rotary(nn.Module):
    """Rotate the first R channels of every head by the token's position. The table is fp32 whatever the compute dtype.

    It has no parameters and no buffer: the R/2 frequencies are made anew, so there is nothing to load and nothing to keep in step.
    """

    def __init__(self, rotary_width: int, base: float) -> None:
        super().__init__()
        self.width, self.base = rotary_width, base

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (T, R) fp32, both halves alike."""
        inverse = 1.0 / self.base ** (torch.arange(0, self.width, 2, dtype=torch.int64, device=device).float() / self.width)
        angles = torch.outer(torch.arange(length, device=device).float(), inverse).repeat(1, 2)
        return angles.cos(), angles.sin()

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both (B, H, T, d) -> the same shapes and dtype, rotated."""
        cos, sin = self.table(query.shape[-2], query.device)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x[..., : self.width].float(), x[..., self.width :]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated.to(x.dtype), rest), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D). The projection's output is laid out head by head: query, key, value of d each."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.rotary = Rotary(config.rotary_width, config.rotary_base)
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.query_key_value(x).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        query, key = self.rotary(query, key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """(B, T, D) -> (B, T, D) through a wider hidden layer with GELU."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.width, config.mlp)
        self.dense_4h_to_h = nn.Linear(config.mlp, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class Block(nn.Module):
    """One transformer layer, (B, T, D) -> (B, T, D); with parallel residual both parts read the same input."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.input_layernorm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.attention = Attention(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.input_layernorm(x))
        if self.parallel:
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Readout(nn.Module):
    """Final norm and projection to the vocabulary, (B, T, D) -> logits (B, T, V)."""

    def __init__(self, config: ModelSection, vocab_size: int) -> None:
        super().__init__()
        self.final_layer_norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, config.width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.final_layer_norm(x), self.weight)


def gpt_neox(config: ModelSection, vocab_size: int) -> list[nn.Module]:
    """Embedding, blocks, readout. Make it under `torch.device("meta")`: the values are for `initialize` or a checkpoint to fill."""
    embedding, readout = Embedding(vocab_size, config.width), Readout(config, vocab_size)
    if config.tie_embeddings:
        readout.weight = embedding.weight
    return [embedding, *(Block(config) for _ in range(config.layers)), readout]


def initialize(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill one parameter in place: norms with ones, biases with zeros, matrices from a normal distribution of deviation 0.02."""
    if name.endswith("bias"):
        tensor.zero_()
    elif "layernorm" in name or "layer_norm" in name:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, INIT_STD, generator=generator)

