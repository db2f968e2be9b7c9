"""Rotary positions, and the ways to stretch them for texts longer than those that a model was trained on.

Letters: B = samples, T = tokens, H = heads, d = channels of a head, R = rotated channels.

Sources: Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2; Chen et al. 2023, Position Interpolation, arXiv:2306.15595 (linear);
Peng et al. 2023, YaRN, arXiv:2309.00071, sections 3.1 to 3.4 (dynamic, yarn); Ding et al. 2024, LongRoPE, arXiv:2402.13753 (longrope);
Grattafiori et al. 2024, Llama 3, arXiv:2407.21783, section 3.4, and its reference code (llama3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rayzero3.config import Architecture, RotaryScaling
from rayzero3.models.context import Context


class Rotary(nn.Module):
    """Rotate the first R channels of every head by the token's position. The table is fp32 whatever the compute dtype.

    It has no parameters and no buffer: the R/2 frequencies are made anew, so there is nothing to load and nothing to keep in step.
    """

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        self.width, self.base, self.scaling, self.max_length = config.rotary_width, config.rotary_base, config.rotary_scaling, config.max_length

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each positions' shape + (R,), fp32, both halves alike."""
        frequencies, scale = self.frequencies(positions)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * scale, angles.sin() * scale

    def frequencies(self, positions: Tensor) -> tuple[Tensor, float | Tensor]:
        """Radians per token of each pair of channels, (R/2,) fp32, and what cosines and sines are multiplied by."""
        device, scaling = positions.device, self.scaling
        exponents = torch.arange(0, self.width, 2, device=device).float() / self.width
        if scaling is None:
            return 1.0 / self.base**exponents, 1.0
        length = positions.max() + 1  # stays on the device
        if scaling.rope_type == "dynamic":
            stretch = scaling.factor * torch.clamp(length, min=self.max_length).float() / self.max_length - (scaling.factor - 1)
            return 1.0 / (self.base * stretch ** (self.width / (self.width - 2))) ** exponents, 1.0
        plain = 1.0 / self.base**exponents
        if scaling.rope_type == "linear":
            return plain / scaling.factor, 1.0
        trained = scaling.original_max_position_embeddings or self.max_length
        if scaling.rope_type == "llama3":
            return _llama3(plain, scaling, trained), 1.0
        if scaling.rope_type == "yarn":
            return _yarn(plain, scaling, trained, self.width, self.base), _yarn_scale(scaling)
        return _longrope(plain, scaling, trained, length), _longrope_scale(scaling, self.max_length, trained)

    def forward(self, query: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """(B, H, T, d) and (B, G, T, d) -> the same shapes and dtype, rotated."""
        length, device = query.shape[-2], query.device

        def make() -> tuple[Tensor, Tensor]:
            if context.cache is None:
                return self.table(torch.arange(length, device=device))
            return tuple(part[:, None] for part in self.table(context.cache.positions(length)))

        cos, sin = context.once(("rotary", self.width, self.base, self.scaling, length), make)
        return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)


class _Rotation(torch.autograd.Function):
    """Rotate the first R channels of (..., T, d) by a table, (..., T, R) each. Backward turns the gradient back: as many passes as forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(upstream, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width, half = cos.shape[-1], cos.shape[-1] // 2
    plain, rest = x[..., :width].float(), x[..., width:]
    rotated = plain * cos
    rotated[..., :half].addcmul_(plain[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(plain[..., :half], sin[..., half:])
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _llama3(plain: Tensor, scaling: RotaryScaling, trained: int) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = trained * plain / (2 * math.pi)  # within the trained length
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(plain: Tensor, scaling: RotaryScaling, trained: int, width: int, base: float) -> Tensor:
    """Pairs that turn more than beta_fast times within the trained length are kept, those below beta_slow stretched, a ramp between."""

    def pair(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.beta_fast or 32), pair(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(width // 2, device=plain.device).float()
    stretched = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain * (1 - stretched) + plain / scaling.factor * stretched


def _yarn_scale(scaling: RotaryScaling) -> float:
    """Scale of the rotated channels, so that attention keeps its temperature on longer texts."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _longrope(plain: Tensor, scaling: RotaryScaling, trained: int, length: Tensor) -> Tensor:
    """Each pair has a factor of its own, another one where the text is longer than the trained length."""
    short, long = (torch.tensor(factors, device=plain.device) for factors in (scaling.short_factor, scaling.long_factor))
    return plain / torch.where(length > trained, long, short)


def _longrope_scale(scaling: RotaryScaling, max_length: int, trained: int) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor or max_length / trained
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
