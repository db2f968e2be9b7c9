"""The shape of Llama, Mistral, Qwen and SmolLM as a list of layers.

Letters: B = samples, T = tokens, D = width, H = heads, G = key/value heads, d = channels of a head, V = vocabulary.

Sources: Touvron et al. 2023, Llama, arXiv:2302.13971, section 2.2; Ainslie et al. 2023, GQA, arXiv:2305.13245, section 2.2; Shazeer 2020,
GLU variants, arXiv:2002.05202; Jiang et al. 2023, Mistral 7B, arXiv:2310.06825, section 2 (window); Yang et al. 2025, Qwen3,
arXiv:2505.09388, section 2 (query/key norm).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from rayzero3.config import Llama
from rayzero3.models.attention import attend
from rayzero3.models.context import Context
from rayzero3.models.head import Embedding, Layers, Readout
from rayzero3.models.norm import RMSNorm
from rayzero3.models.rotary import Rotary


class Attention(nn.Module):
    """Causal self-attention of grouped queries, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: Llama, layer: int) -> None:
        super().__init__()
        size = config.head_width
        self.size, self.layer, self.window = size, layer, config.window_of(layer)
        self.q_proj = nn.Linear(config.width, config.heads * size, config.input_bias)
        self.k_proj = nn.Linear(config.width, config.groups * size, config.input_bias)
        self.v_proj = nn.Linear(config.width, config.groups * size, config.input_bias)
        self.o_proj = nn.Linear(config.heads * size, config.width, config.output_bias)
        self.q_norm = RMSNorm(size, config.norm_eps) if config.query_key_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.norm_eps) if config.query_key_norm else nn.Identity()
        self.rotary = Rotary(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
        query, key = self.rotary(query, key, context)
        return self.o_proj(attend(query, key, value, context, self.layer, self.window))


class FeedForward(nn.Module):
    """(B, T, D) -> (B, T, D): SwiGLU."""

    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp, config.mlp_bias)
        self.up_proj = nn.Linear(config.width, config.mlp, config.mlp_bias)
        self.down_proj = nn.Linear(config.mlp, config.width, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer layer, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: Llama, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context or Context())
        return x + self.mlp(self.post_attention_layernorm(x))


def llama(config: Llama, vocab_size: int) -> Layers:
    """Embedding, blocks, readout, each with its name. Make it under `torch.device("meta")`: the values are for others to fill."""
    embedding = Embedding(vocab_size, config.width)
    readout = Readout("model.norm", RMSNorm(config.width, config.norm_eps), "lm_head", vocab_size, config.width)
    if config.tie_embeddings:
        readout.tie(embedding)
    blocks = [(f"model.layers.{layer}", Block(config, layer)) for layer in range(config.layers)]
    return [("model.embed_tokens", embedding), *blocks, ("", readout)]
