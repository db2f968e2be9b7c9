"""Zero3Model: what every sharded model can do; and Zero3Sequential, the one that is a list of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rayzero3.engine.layer import Zero3Layer
from rayzero3.engine.malloc import keep_freed_memory
from rayzero3.engine.order import FetchOrder


class Zero3Model(nn.Module):
    """Layers that prefetch each other and reduce in one order.

    Args:
        layers: The layers, all of one process group.
        prefetch: Layers fetched ahead of the one that computes; each costs its full parameters in memory.
        average: Divide reduced gradients by N: right where the loss of each rank is the mean of its own part. A trainer that
            divides each rank's loss by the global number of valid tokens passes False.
        rooted, pinned: As in FetchOrder.

    Attributes:
        comm: The communicator that all layers share.
    """

    def __init__(self, layers: list[Zero3Layer], prefetch: int, average: bool, rooted: bool, pinned: Sequence[Zero3Layer] = ()) -> None:
        super().__init__()
        self.comm = layers[0].comm
        if layers[0].device.type == "cpu":
            keep_freed_memory()
        for index, layer in enumerate(layers):
            for member in (*layer.held, layer):
                member.name = str(index) if member.name is None else member.name
        self._order = FetchOrder(layers, self.comm, prefetch, average=average, rooted=rooted, pinned=pinned)
        for layer in self._order.layers():
            layer.join(self._order)
        self.comm.watch()

    def all_layers(self) -> list[Zero3Layer]:
        """The layers and those of tied weights, each once, in fetch order."""
        return self._order.layers()

    @property
    def prefetch(self) -> int:
        """Layers fetched ahead of the one that computes."""
        return self._order.prefetch

    def whole_bytes(self) -> tuple[int, list[int], int]:
        """Bytes of full parameters: of pinned and tied ones together, of each other layer, of the last, which stays from its forward to its backward."""
        return self._order.whole_bytes()

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """This rank's trainable chunks, each (C,) fp32, tied weights once: what the optimizer takes."""
        return [layer.trainable.chunk for layer in self.all_layers() if layer.trainable is not None]

    @contextmanager
    def hold_gradients(self) -> Iterator[None]:
        """Backwards inside send nothing; the first one outside reduces what has gathered. For the micro-batches of a step but the last.

        Cost: 4 bytes per trainable parameter on every rank, not divided by N; saves all but one reduce-scatter per layer and step.
        """
        self._order.hold_gradients = True
        try:
            yield
        finally:
            self._order.hold_gradients = False

    @contextmanager
    def keep_fetched(self, budget_bytes: int) -> Iterator[None]:
        """Layers that fit into a budget stay whole from their first use inside to the end, those first whose fetches cost most.

        For the micro-batches of a step: a kept layer is fetched once instead of twice for each. The optimizer steps outside.

        Cost: up to `budget_bytes` of memory on every rank, not divided by N.
        """
        self._order.keep(budget_bytes)
        try:
            yield
        finally:
            self._order.keep(0)


class Zero3Sequential(Zero3Model):
    """A model that is a list of layers.

    Args:
        modules: The layers, all of one process group.
        prefetch, average: As in Zero3Model.

    Attributes:
        layers: The layers, in order.
    """

    def __init__(self, modules: list[Zero3Layer], prefetch: int = 1, average: bool = True) -> None:
        super().__init__(modules, prefetch, average, rooted=False)
        self.layers = nn.ModuleList(modules)

    def forward(self, x: Any, *shared: Any) -> Any:
        """Each layer's output is the next one's input; what comes after it is given to every layer."""
        for layer in self.layers:
            x = layer(x, *shared)
        return x
