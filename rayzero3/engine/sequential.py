"""Zero3Sequential: Zero3Layers called one after the other, prefetching each other."""

from __future__ import annotations

from typing import Any

from torch import nn

from rayzero3.engine.layer import Zero3Layer
from rayzero3.engine.order import FetchOrder


class Zero3Sequential(nn.Module):
    """A model that is a list of layers.

    Args:
        modules: The layers, all of one process group.
        prefetch: Layers fetched ahead of the one that computes; each costs its full parameters in memory.
        average: Divide reduced gradients by N: right where the loss of each rank is the mean of its own part. A trainer that
            divides each rank's loss by the global number of valid tokens passes False.

    Attributes:
        layers: The layers, in order.
        comm: The communicator that all of them share.
    """

    def __init__(self, modules: list[Zero3Layer], prefetch: int = 1, average: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self.comm = modules[0].comm
        for index, layer in enumerate(modules):
            for member in (*layer.held, layer):
                member.name = str(index) if member.name is None else member.name
        self._order = FetchOrder(modules, self.comm, prefetch, average=average)
        for layer in self._order.layers():
            layer.join(self._order)

    def all_layers(self) -> list[Zero3Layer]:
        """The layers and those of tied weights, each once, in fetch order."""
        return self._order.layers()

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """This rank's trainable chunks, each (C,) fp32, tied weights once: what the optimizer takes."""
        return [layer.trainable.chunk for layer in self.all_layers() if layer.trainable is not None]

    def forward(self, x: Any) -> Any:
        """Each layer's output is the next one's input."""
        for layer in self.layers:
            x = layer(x)
        return x
