"""Zero3Adam: torch's fused AdamW on chunks, with a global norm and a verdict that stay on the device.

Letters: C = elements of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Zero3Adam(torch.optim.AdamW):
    """AdamW on this rank's chunks. Elementwise, so no communication, but for the norm.

    Args:
        chunks: `get_trainable_chunk()` of a layer or a sequence; each (C,) fp32.
        lr, betas, eps: As in torch.optim.AdamW.
        weight_decay: Decoupled; 0 makes it Adam.

    Cost: two moments of 4 bytes per element of the chunks.

    Source: Kingma & Ba 2015, Adam, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
    """

    def __init__(
        self, chunks: list[nn.Parameter], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(chunks, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @property
    def chunks(self) -> list[nn.Parameter]:
        """The chunks, in order."""
        return [chunk for group in self.param_groups for chunk in group["params"]]

    @property
    def updates(self) -> int:
        """Updates made so far, skipped ones not counted. Waits for the device."""
        steps = [int(self.state[chunk]["step"]) for chunk in self.chunks if "step" in self.state[chunk]]
        return max(steps, default=0)

    def empty_state(self, chunk: nn.Parameter, updates: int) -> dict[str, Tensor]:
        """Give a chunk the state of `updates` updates with zero moments, for a checkpoint to fill; exp_avg, exp_avg_sq (C,) and step ()."""
        state = {"exp_avg": torch.zeros_like(chunk.data), "exp_avg_sq": torch.zeros_like(chunk.data)}
        self.state[chunk] = {"step": torch.tensor(float(updates), dtype=torch.float32, device=chunk.device), **state}
        return state

    def global_norm(self) -> Tensor:
        """2-norm of all gradients over all ranks: () fp64 on the device. Padding is zero and adds nothing. Every rank calls it."""
        grads = [chunk.grad for chunk in self.chunks if chunk.grad is not None]
        squares = [torch.linalg.vector_norm(grad).double().square() for grad in grads]
        own = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.chunks[0].device)
        return self.chunks[0].comm.sum_rows(own.view(1), "gradient norm").sqrt()[0]

    def clip(self, max_norm: float | None = None) -> Tensor:
        """Prepare the next `step`: scale the gradients to a global norm of `max_norm`, and skip the update if the norm is not finite.

        The host waits for nothing: the fused kernel reads both from the device.

        Returns:
            The norm before clipping, () fp64.
        """
        norm = self.global_norm()
        scale = torch.ones_like(norm) if max_norm is None else (norm / max_norm).clamp(min=1.0)
        finite = torch.isfinite(norm)
        self.grad_scale = torch.where(finite, scale, 1.0).float()
        self.found_inf = (~finite).float()
        return norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the chunks from their gradients, once for every `clip`."""
        super().step(closure)
        self.grad_scale = self.found_inf = None
