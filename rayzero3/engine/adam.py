"""Zero3Adam: torch's fused AdamW on chunks, with a global norm and a verdict that stay on the device.

Letters: C = elements of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rayzero3.engine.offload import host_empty
from rayzero3.engine.scaler import LossScaler
from rayzero3.engine.streams import Launched


class Zero3Adam(torch.optim.AdamW):
    """AdamW on this rank's chunks. Elementwise, so no communication, but for the norm.

    Offloaded chunks are updated in a thread of the host; whoever reads a chunk, a fetch or a checkpoint, waits for its update.

    Args:
        chunks: `get_trainable_chunk()` of a layer or a sequence; each (C,) fp32.
        lr, betas, eps: As in torch.optim.AdamW.
        weight_decay: Decoupled; 0 makes it Adam. It spares parameters of fewer than two dimensions: norms, biases, scalars.
        scaler: What the losses are multiplied with, for fp16 compute.
        moment_dtype: Of the two moments between updates; the update itself is in fp32. bf16 keeps 8 bits: a second moment that should
            change by less than 2**-9 of itself in an update stays as it is, so its beta is to be at most 0.99.
        average_decay: Keep an exponential moving average of the weights, which keeps this share of itself at each update.

    Attributes:
        first_overflow: () int64, the first chunk whose gradient was not finite on any rank at the last `clip`; -1 if none.

    Cost: two moments of 4 bytes (2 in bf16) per element of the chunks, 4 more for the average.

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
        moment_dtype: torch.dtype = torch.float32,
        average_decay: float | None = None,
    ) -> None:
        # torch would decay whole chunks; which elements of a chunk decay is for `_decay` to say.
        super().__init__(chunks, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True)
        self.decay, self.scaler, self.moment_dtype, self.average_decay = weight_decay, scaler, moment_dtype, average_decay
        self.first_overflow = torch.tensor(-1)
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._host: Executor | None = None

    @property
    def chunks(self) -> list[nn.Parameter]:
        """The chunks, in order."""
        return [chunk for group in self.param_groups for chunk in group["params"]]

    @property
    def updates(self) -> int:
        """Updates made so far, skipped ones not counted. Waits for the device."""
        self.wait()
        steps = [int(self.state[chunk]["step"]) for chunk in self.chunks if "step" in self.state[chunk]]
        return max(steps, default=0)

    def wait(self) -> None:
        """Have the host wait for the updates of offloaded chunks."""
        for chunk in self.chunks:
            if chunk.offload is not None:
                chunk.offload.wait_updated()

    def tensors(self, chunk: nn.Parameter) -> dict[str, Tensor]:
        """A chunk's moments and average by name, each (C,): what a checkpoint keeps beside the chunk."""
        return {kind: value for kind, value in self.state[chunk].items() if kind != "step"}

    def empty_state(self, chunk: nn.Parameter, updates: int) -> dict[str, Tensor]:
        """Give a chunk the state of `updates` updates with zero moments, and return its `tensors` for a checkpoint to fill."""
        moments = {kind: torch.zeros_like(chunk.data, dtype=self.moment_dtype) for kind in ("exp_avg", "exp_avg_sq")}
        average = {} if self.average_decay is None else {"average": chunk.data.clone()}
        self.state[chunk] = {"step": torch.tensor(float(updates), dtype=torch.float32, device=chunk.device), **moments, **average}
        return moments | average

    def global_norm(self) -> Tensor:
        """2-norm of all gradients over all ranks: () fp64 on the device. Padding is zero and adds nothing. Every rank calls it."""
        comm = self.chunks[0].comm
        comm.copied_out()
        zero = torch.zeros((), dtype=torch.float64, device=comm.device)
        own = torch.stack([zero if chunk.grad is None else _square(chunk) for chunk in self.chunks])
        squares = comm.sum_rows(own, "gradient norm", one_copy=True)
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. They are never kept as zeros: what reduces next takes their place."""
        super().zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the chunks from their gradients, once for every `clip`. For offloaded chunks it returns while the host updates."""
        comm, numbers = self.chunks[0].comm, (self.grad_scale, self.found_inf)
        for group in self.param_groups:
            chunks = [chunk for chunk in group["params"] if chunk.grad is not None]
            rates = {"lr": group["lr"], "beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
            here = [chunk for chunk in chunks if chunk.offload is None]
            if here:
                self._update(here, [chunk.grad for chunk in here], rates, *numbers)
            away = [chunk for chunk in chunks if chunk.offload is not None]
            if away:
                self._host = self._host or ThreadPoolExecutor(1, "rayzero3-adam")
                told = [None if number is None else host_empty(1, torch.float32, comm.device) for number in numbers]
                arrives = comm.copy_out(_copy(numbers, told), *numbers)
                for chunk in away:
                    chunk.offload.update = self._host.submit(self._update_on_host, chunk, chunk.grad, rates, told, arrives)
                    arrives = None
        self.grad_scale = self.found_inf = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the chunks hold the moving average of the weights, for a validation or an export."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self.wait()
        for chunk in self.chunks:
            if "average" in self.state[chunk]:
                average, now = self.state[chunk]["average"], chunk.detach().clone()
                chunk.copy_(average)
                average.copy_(now)

    @torch.no_grad()
    def _update_on_host(self, chunk: nn.Parameter, grad: Tensor, rates: dict[str, float], told: list[Tensor | None], arrives: Launched | None) -> None:
        if arrives is not None:  # the last copy to the host, and so all gradients before it; what the thread does later comes after
            arrives.synchronize()
        self._update([chunk], [grad], rates, *(None if number is None else number.view(()) for number in told))

    def _update(self, chunks: list[nn.Parameter], grads: list[Tensor], rates: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None) -> None:
        """One fused update of some chunks; with bf16 moments chunk by chunk, so that one pair of them is fp32 at a time."""
        for chunk in chunks:
            if not self.state[chunk]:
                self.empty_state(chunk, 0)
            if self.decay:
                self._decay(chunk, rates["lr"], found_inf)
        together = self.moment_dtype is torch.float32
        for part in [range(len(chunks))] if together else [[index] for index in range(len(chunks))]:
            states = [self.state[chunks[index]] for index in part]
            kept = [[state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq")]
            first, second = ([moment.float() for moment in moments] for moments in kept)
            steps = [state["step"] for state in states]
            adamw(
                [chunks[index] for index in part], [grads[index] for index in part], first, second, [], steps,
                fused=True, grad_scale=scale, found_inf=found_inf, amsgrad=False, weight_decay=0.0, maximize=False, **rates,
            )  # fmt: skip
            if not together:
                for moment, value in zip(kept[0] + kept[1], first + second, strict=True):
                    moment.copy_(value)
        for chunk in chunks if self.average_decay is not None else []:
            share = 1.0 - self.average_decay
            self.state[chunk]["average"].lerp_(chunk, share if found_inf is None else torch.where(found_inf > 0, 0.0, share))

    def _decay(self, chunk: nn.Parameter, lr: float, found_inf: Tensor | None) -> None:
        """Multiply what decays by 1 - lr * weight_decay, unless the update is skipped."""
        factor = 1.0 - lr * self.decay
        if found_inf is not None:
            factor = torch.where(found_inf > 0, 1.0, factor)
        for shape, start, stop in chunk.parts:
            if len(shape) >= 2:
                chunk[start:stop].mul_(factor)


def _square(chunk: nn.Parameter) -> Tensor:
    """() fp64 on the device, squared 2-norm of a chunk's gradient."""
    if chunk.offload is not None:
        return chunk.offload.square
    return torch.linalg.vector_norm(chunk.grad).double().square()


def _copy(sources: tuple[Tensor | None, ...], targets: list[Tensor | None]) -> Any:
    def copy() -> tuple:
        for source, target in zip(sources, targets, strict=True):
            if source is not None:
                target.copy_(source.view(1), non_blocking=True)
        return ()

    return copy
