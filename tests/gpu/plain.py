"""Plain mixed precision to compare with: fp32 masters, a copy in the compute dtype, torch's AdamW."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rayzero3.engine import Zero3Layer, Zero3Sequential


class Plain:
    """One process, one device, nothing sharded.

    Args:
        layers: Copied; fp32.
        dtype: What computes.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        self.module = nn.Sequential(*copy.deepcopy(layers)).to(device, dtype)
        masters = nn.Sequential(*copy.deepcopy(layers)).to(device)
        self.masters = dict(masters.named_parameters())
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-3, weight_decay=0.0, fused=True)

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        """The gradients, fp32, which the masters get too."""
        self.module.zero_grad()
        loss.backward()
        for name, parameter in self.module.named_parameters():
            self.masters[name].grad = parameter.grad.float()
        return {name: master.grad for name, master in self.masters.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and the module from them."""
        self.optimizer.step()
        for name, parameter in self.module.named_parameters():
            parameter.copy_(self.masters[name])


def sharded(layers: list[nn.Module], device: torch.device, dtype: torch.dtype, offload: bool = False, **kwargs: int) -> Zero3Sequential:
    """A copy of the layers as Zero3Layers of one rank."""
    return Zero3Sequential([Zero3Layer(layer, 0, 1, device, dtype, offload=offload) for layer in copy.deepcopy(layers)], **kwargs)


def assert_close_by_layer(mine: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """Each layer's gradient to `bound` of its norm."""
    assert set(mine) == set(theirs)
    for layer in {name.split(".")[0] for name in theirs}:
        names = [name for name in theirs if name.split(".")[0] == layer]
        error = torch.stack([(mine[name] - theirs[name]).norm() for name in names]).norm()
        norm = torch.stack([theirs[name].norm() for name in names]).norm()
        assert error <= bound * norm, f"layer {layer}: {float(error / norm):.2e} of its norm"
