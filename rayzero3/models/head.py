"""The first and the last layer of a language model: token ids in, logits or the loss out.

Letters: B = samples, T = tokens, D = width, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayzero3.models.context import Context
from rayzero3.models.loss import head_loss

Layers = list[tuple[str, nn.Module]]
"""A model: its layers in order, each with the first part of its parameters' names. The names are those of its Hugging Face file."""


class Embedding(nn.Module):
    """Token ids (B, T) int64 -> hidden states (B, T, D)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        return F.embedding(ids, self.weight)


class Readout(nn.Module):
    """Final norm and projection to the vocabulary, (B, T, D) -> logits (B, T, V), or the loss, () fp32, where the context has labels.

    With a cache in the context, logits (B, 1, V) of the last token.

    Args:
        norm_name, head_name: Where the two stand in the model's file.
    """

    def __init__(self, norm_name: str, norm: nn.Module, head_name: str, vocab_size: int, width: int) -> None:
        super().__init__()
        self.norm_name, self.head_name = norm_name, head_name
        owner: nn.Module = self
        *parents, leaf = norm_name.split(".")
        for parent in parents:
            owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(leaf, norm)
        self.add_module(head_name, nn.Linear(width, vocab_size, bias=False))

    def tie(self, embedding: Embedding) -> None:
        """Project with the embedding's weight."""
        self.get_submodule(self.head_name).weight = embedding.weight

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        if context is not None and context.cache is not None:
            x = x[:, -1:]  # generation asks for the next token alone
        x = self.get_submodule(self.norm_name)(x)
        if context is None or context.labels is None:
            return self.get_submodule(self.head_name)(x)
        weight = self.get_submodule(self.head_name).weight
        return head_loss(x.flatten(0, 1), weight, context.labels.flatten(), context.loss, context.factor)
