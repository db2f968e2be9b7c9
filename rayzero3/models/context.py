"""Context: what every layer of a forward is told beside the hidden states. Cache: the keys and values that generation keeps.

Letters: B = samples, T = tokens of this forward, S = tokens that the cache has room for, G = key/value heads, d = channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayzero3.config import LossSection

Made = TypeVar("Made")


class Cache:
    """Keys and values of the tokens so far, for prompts that are padded on the left to one length.

    Args:
        pads: (B,) int64, columns of padding before each prompt.
        size: S.

    Attributes:
        filled: Columns with tokens in them, padding included.
        foreign: What another library's model keeps instead.

    Cost: 2 x B x S x G x d elements for each block, allocated at its first token.
    """

    def __init__(self, pads: Tensor, size: int) -> None:
        self.pads, self.size, self.filled = pads, size, 0
        self.foreign: Any = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def positions(self, length: int) -> Tensor:
        """(B, T) int64: the place in its text of each of the next `length` columns; 0 on padding."""
        columns = torch.arange(self.filled, self.filled + length, device=self.pads.device)
        return (columns - self.pads[:, None]).clamp(min=0)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the (B, G, T, d) of a block and return all that it has so far, (B, G, filled + T, d)."""
        if layer not in self._layers:
            shape = (*key.shape[:2], self.size, key.shape[3])
            self._layers[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        stop = self.filled + key.shape[2]
        for kept, new in zip(self._layers[layer], (key, value), strict=True):
            kept[:, :, self.filled : stop] = new
        keys, values = self._layers[layer]
        return keys[:, :, :stop], values[:, :, :stop]

    def mask(self, length: int, window: int | None) -> Tensor:
        """(B, 1, T, filled + T) bool: what each of the next `length` columns may see. Padding sees itself, so that no row is empty."""
        columns = torch.arange(self.filled + length, device=self.pads.device)
        rows = columns[self.filled :, None]
        seen = columns <= rows
        if window is not None:
            seen &= columns > rows - window
        return ((seen & (columns >= self.pads[:, None, None])) | (columns == rows))[:, None]


@dataclass
class Context:
    """One forward.

    Attributes:
        labels: (B, T) int64, MASKED where nothing counts; then the readout returns the loss instead of logits.
        loss: What is minimised beside the cross-entropy.
        factor: () the gradient that the loss will get, as far as it is known before: keeps what is computed early in range under fp16.
        cache: For generation, or None.
    """

    labels: Tensor | None = None
    loss: LossSection = LossSection()
    factor: Tensor | None = None
    cache: Cache | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made at the first call with this key: what is alike in all layers, such as a rotary table."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
