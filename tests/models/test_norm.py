"""RMSNorm with a backward of its own is torch's RMSNorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayzero3.models.norm import RMSNorm


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(dtype, frozen):
    generator = torch.Generator().manual_seed(0)
    mine, theirs = RMSNorm(48, 1e-5).to(dtype), nn.RMSNorm(48, 1e-5).to(dtype)
    results = []
    x = torch.randn(3, 7, 48, generator=generator).to(dtype)
    weight, upstream = torch.randn(48, generator=generator), torch.randn(3, 7, 48, generator=generator).to(dtype)
    for norm in (mine, theirs):
        norm.weight.data.copy_(weight)
        norm.weight.requires_grad_(not frozen)
        given = x.clone().requires_grad_()
        out = norm(given)
        out.backward(upstream)
        results.append((out.detach(), given.grad, *([] if frozen else [norm.weight.grad])))
    for found, expected in zip(*results, strict=True):
        assert found.dtype is dtype and (found - expected).norm() <= 1e-6 * expected.norm()
