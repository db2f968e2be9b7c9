"""Zero3Adam: torch's fused AdamW on chunks, with a global norm and a verdict that stay on the device.

Letters: C = elements of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero3.engine.scaler import LossScaler


class Zero3Adam(torch.optim.AdamW):
    """AdamW on this rank's chunks. Elementwise, so no communication, but for the norm.

    Args:
        chunks: `get_trainable_chunk()` of a layer or a sequence; each (C,) fp32.
        lr, betas, eps: As in torch.optim.AdamW.
        weight_decay: Decoupled; 0 makes it Adam. It spares parameters of fewer than two dimensions: norms, biases, scalars.
        scaler: What the losses are multiplied with, for fp16 compute.

    Attributes:
        first_overflow: () int64, the first chunk whose gradient was not finite on any rank at the last `clip`; -1 if none.

    Cost: two moments of 4 bytes per element of the chunks.

    Source: Kingma & Ba 2015, Adam, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
    """

    def __init__(
        self,
        chunks: list[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        scaler: LossScaler | None = None,
    ) -> None:
        # torch would decay whole chunks; which elements of a chunk decay is for `_decay` to say.
        super().__init__(chunks, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True)
        self.decay, self.scaler = weight_decay, scaler
        self.first_overflow = torch.tensor(-1)
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None

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
        zero = torch.zeros((), dtype=torch.float64, device=self.chunks[0].device)
        own = torch.stack([zero if chunk.grad is None else torch.linalg.vector_norm(chunk.grad).double().square() for chunk in self.chunks])
        squares = self.chunks[0].comm.sum_rows(own, "gradient norm", one_copy=True)
        bad = ~torch.isfinite(squares)
        self.first_overflow = torch.where(bad.any(), bad.int().argmax(), -1)
        return squares.sum().sqrt()

    def clip(self, max_norm: float | None = None) -> Tensor:
        """Prepare the next `step`: scale the gradients to a global norm of `max_norm`, and skip the update if the norm is not finite.

        The verdict is global, since a value that is not finite on any rank makes the norm so. The host waits for nothing: the fused
        kernel reads norm and verdict from the device.

        Where there is a scaler, the gradients are divided by its scale, and it learns the verdict.

        Returns:
            The norm before clipping, of the gradients without the loss's scale, () fp64.
        """
        norm = self.global_norm()
        scale = torch.ones_like(norm)
        if self.scaler is not None:
            scale = self.scaler.scale.double()
            norm = norm / scale
        finite = torch.isfinite(norm)
        if max_norm is not None:
            scale = scale * torch.where(finite, norm / max_norm, 1.0).clamp(min=1.0)
        self.grad_scale = scale.float()
        self.found_inf = (~finite).float()
        if self.scaler is not None:
            self.scaler.learn(self.found_inf)
        return norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the chunks from their gradients, once for every `clip`."""
        if self.decay:
            self._decay()
        super().step(closure)
        self.grad_scale = self.found_inf = None

    def _decay(self) -> None:
        """Multiply what decays by 1 - lr * weight_decay, unless the update is skipped."""
        for group in self.param_groups:
            factor = 1.0 - group["lr"] * self.decay
            if self.found_inf is not None:
                factor = torch.where(self.found_inf > 0, 1.0, factor)
            for chunk in group["params"]:
                for shape, start, stop in chunk.parts:
                    if len(shape) >= 2:
                        chunk[start:stop].mul_(factor)
