"""Dropout whose mask is a function of (seed, name, step, sample): the same on any number of ranks, in any micro-batch, and when a layer is run again.

Letters: B = samples, the first dimension of whatever is masked.

Note: no generator has a state. Every element's bits come from a counter through the mixing function of SplitMix64: a key of 64 bits for
each (seed, name), mixed with the step, with the sample, and with the element's index in the sample.

Source: Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators, section 4 (the mixing function).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class DropoutKeys:
    """What the masks of a model depend on; one for all of its dropouts. Whoever trains sets it before each micro-batch.

    Attributes:
        seed: Of the run.
        step: Of the run.
        samples: (B,) int64 ids of the samples in this forward; None: nothing is dropped.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, 0
        self.samples: Tensor | None = None

    def drop(self, x: Tensor, probability: float, name: str) -> Tensor:
        """Zero a part of `x`, (B, ...), and scale the rest by 1 / (1 - probability)."""
        if self.samples is None or probability == 0.0:
            return x
        return x * (keep_mask(self.seed, name, self.step, self.samples, x.shape[1:], probability) / (1 - probability)).to(x.dtype)


def keep_mask(seed: int, name: str, step: int, samples: Tensor, shape: torch.Size, probability: float) -> Tensor:
    """(B, *shape) bool, true with probability 1 - `probability`."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    rows = _mix(_mix(samples + _signed(key)) + _signed(step * _GOLDEN))
    elements = torch.arange(1, shape.numel() + 1, device=samples.device) * _signed(_GOLDEN)
    bits = _mix(rows[:, None] + elements)
    return ((bits >> 11) & (2**53 - 1) >= int(probability * 2**53)).view(len(samples), *shape)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, where a product wraps and a shift drags the sign along."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(_FIRST)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(_SECOND)
    return x ^ ((x >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
