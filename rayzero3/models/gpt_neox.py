"""GPT-NeoX as a list of layers.

Letters: B = samples, T = tokens, D = width, H = heads, d = D / H, V = vocabulary.

Source: Black et al. 2022, GPT-NeoX-20B, arXiv:2204.06745, section 2.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from rayzero3.config import GptNeox
from rayzero3.models.attention import attend
from rayzero3.models.context import Context
from rayzero3.models.head import Embedding, Layers, Readout
from rayzero3.models.rotary import Rotary


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D). The projection's output is laid out head by head: query, key, value of d each."""

    def __init__(self, config: GptNeox, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = config.heads, layer
        self.query_key_value = nn.Linear(config.width, 3 * config.width, config.attention_bias)
        self.rotary = Rotary(config)
        self.dense = nn.Linear(config.width, config.width, config.attention_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(x).view(batch, length, self.heads, -1).chunk(3, dim=-1)
        query, key, value = (part.transpose(1, 2) for part in parts)  # after the chunk, whose backward is laid out as its input is
        query, key = self.rotary(query, key, context)
        return self.dense(attend(query, key, value, context, self.layer))


class FeedForward(nn.Module):
    """(B, T, D) -> (B, T, D) through a wider hidden layer with GELU."""

    def __init__(self, config: GptNeox) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.width, config.mlp)
        self.activation = partial(F.gelu, approximate="tanh" if config.activation == "gelu_tanh" else "none")
        self.dense_4h_to_h = nn.Linear(config.mlp, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))


class Block(nn.Module):
    """One transformer layer, (B, T, D) -> (B, T, D); with parallel residual both parts read the same input."""

    def __init__(self, config: GptNeox, layer: int = 0) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.input_layernorm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        attended = self.attention(self.input_layernorm(x), context or Context())
        if self.parallel:
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def gpt_neox(config: GptNeox, vocab_size: int) -> Layers:
    """Embedding, blocks, readout, each with its name. Make it under `torch.device("meta")`: the values are for others to fill."""
    embedding = Embedding(vocab_size, config.width)
    norm = nn.LayerNorm(config.width, config.layer_norm_eps)
    readout = Readout("gpt_neox.final_layer_norm", norm, "embed_out", vocab_size, config.width)
    if config.tie_embeddings:
        readout.tie(embedding)
    blocks = [(f"gpt_neox.layers.{layer}", Block(config, layer)) for layer in range(config.layers)]
    return [("gpt_neox.embed_in", embedding), *blocks, ("", readout)]
