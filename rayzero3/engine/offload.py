"""Offload: a chunk that stays in host memory and is updated there, while the device computes.

The chunk travels to the device as part of every fetch, its reduced gradient back as soon as it is there. The update needs the global norm
and so waits for the last reduction; from then on a thread of the host updates chunk after chunk in fetch order, and the next forward runs
meanwhile: the fetch of a layer waits for that layer's update alone. On a GPU, chunks and gradients lie in pinned memory.

Letters: C = elements of one chunk.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rayzero3.engine.comm import Comm


def host_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) in host memory, pinned where a GPU copies from and to it."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")


class Offload:
    """The host's side of one chunk.

    Args:
        chunk: The chunk, in host memory; its gradient is there too.

    Attributes:
        square: () fp64 on the device, squared 2-norm of the gradient that landed last.
        update: The update that is under way, or None.
    """

    def __init__(self, chunk: nn.Parameter) -> None:
        self._chunk = chunk
        self.square: Tensor | None = None
        self.update: Future | None = None

    def land(self, reduced: Tensor, comm: Comm) -> None:
        """Launch the copy of a reduced gradient, (C,) fp32 on the device, to the chunk's gradient; what earlier micro-batches left is added first."""
        first = self._chunk.grad is None
        if first:
            self._chunk.grad = host_empty(reduced.numel(), reduced.dtype, reduced.device)
        grad, square = self._chunk.grad, reduced.new_empty((), dtype=torch.float64)

        def copy() -> tuple:
            if not first:
                reduced.add_(grad.to(reduced.device, non_blocking=True))
            square.copy_(torch.linalg.vector_norm(reduced).double().square())
            grad.copy_(reduced, non_blocking=True)
            return ()

        comm.copy_out(copy, reduced)
        self.square = square

    def wait_updated(self) -> None:
        """Have the host wait until the chunk has the values of the last update."""
        if self.update is not None:
            self.update.result()
            self.update = None
