"""RMSNorm whose backward knows its formula: torch has a kernel for it on GPUs alone, and on a CPU a chain of small operations.

Letters: n = tokens, D = width.

For y = x r w with r = (mean(x^2) + e)^(-1/2) and the gradient g of y, that of w is the sum over tokens of g x r, and that of x is
r g w - x r^3 / D (g x . w).

Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467, section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """(..., D) -> (..., D). In fp32 on a CPU: 3 passes forward, 6 backward, and of what it made it keeps one number a token."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype is self.weight.dtype is torch.float32:
            return _Norm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rate = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, rate)
        return (x * rate).mul_(weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rate = ctx.saved_tensors
        width, x_grad, weight_grad = x.shape[-1], None, None
        products = (upstream * x).flatten(0, -2)  # (n, D)
        if ctx.needs_input_grad[1]:
            weight_grad = rate.flatten() @ products
        if ctx.needs_input_grad[0]:
            inner = (products @ weight).view(rate.shape)
            x_grad = (upstream * weight).mul_(rate).addcmul_(x, inner * rate**3, value=-1 / width)
        return x_grad, weight_grad, None
