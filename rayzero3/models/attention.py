"""Attention: queries, keys and values of one block to what is mixed, with or without a window and a cache.

Letters: B = samples, T = tokens, H = heads, G = key/value heads, d = channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rayzero3.models.context import Context


def attend(query: Tensor, key: Tensor, value: Tensor, context: Context, layer: int, window: int | None = None) -> Tensor:
    """Causal attention through torch's fused kernels.

    Args:
        layer: Number of the block, for the cache.
        window: Tokens that a token sees, itself included; None: all before it.

    Shapes:
        query: (B, H, T, d). key, value: (B, G, T, d); H is a multiple of G.
        returns: (B, T, H*d).
    """
    mask, length = None, query.shape[2]
    if context.cache is not None:
        key, value = context.cache.extend(layer, key, value)
        mask = context.once(("mask", window), lambda: context.cache.mask(length, window))
    elif window is not None and window < length:
        mask = context.once(("mask", window), lambda: _window_mask(length, window, query.device))
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.device.type == "cpu":  # its fused kernel takes no groups
        key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        grouped = False
    mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(2)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    columns = torch.arange(length, device=device)
    rows = columns[:, None]
    return (columns <= rows) & (columns > rows - window)
