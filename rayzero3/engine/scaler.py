"""LossScaler: what keeps small fp16 gradients from vanishing, and large ones from staying infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero3.errors import StateError


class LossScaler:
    """A dynamic loss scale that lives on the device.

    Multiply the loss by `scale` before backward, and give the scaler to Zero3Adam. A step whose gradients are not finite on any
    rank is skipped on all of them and halves the scale; `growth_steps` good ones in a row double it.

    Args:
        device: Where the loss is.
        initial: First scale.
        growth_steps: Good steps in a row before the scale doubles.
        most_skips: Skips in a row that `check` takes.

    Attributes:
        scale: () fp32.
        skips, good: () int32, skips in a row, good steps in a row.

    Source: Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    def __init__(self, device: torch.device | str, initial: float = 2.0**16, growth_steps: int = 2000, most_skips: int = 20) -> None:
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self.skips = torch.zeros((), dtype=torch.int32, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        self.growth_steps, self.most_skips = growth_steps, most_skips

    def learn(self, found_inf: Tensor) -> None:
        """Take a step's verdict, () fp32, above 0 if it is skipped. Nothing waits."""
        bad = found_inf > 0
        self.good = torch.where(bad, 0, self.good + 1)
        grown = self.good >= self.growth_steps
        self.scale = torch.where(bad, self.scale / 2, torch.where(grown, self.scale * 2, self.scale))
        self.good = torch.where(grown, 0, self.good)
        self.skips = torch.where(bad, self.skips + 1, 0)

    def numbers(self) -> dict[str, float]:
        """Its state as plain numbers, for a checkpoint. Waits for the device."""
        return {"scale": float(self.scale), "skips": int(self.skips), "good": int(self.good)}

    def restore(self, numbers: dict[str, float]) -> None:
        """Take a state that `numbers` gave."""
        for name, value in numbers.items():
            getattr(self, name).fill_(value)

    def check(self, worst_layer: str | None = None) -> None:
        """Wait for the device and raise StateError after too many skips in a row.

        Args:
            worst_layer: The first layer whose gradients were not finite, if it is known, for the message.
        """
        skips = int(self.skips)
        if skips >= self.most_skips:
            where = f", first in layer {worst_layer}" if worst_layer else ""
            raise StateError(
                f"the gradients overflowed {skips} steps in a row{where}",
                None,
                f"the loss scale is down to {float(self.scale):g}",
                "Lower the learning rate, clip the gradient norm, or compute in bf16.",
            )
