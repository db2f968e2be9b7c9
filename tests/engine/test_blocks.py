"""Frozen matrices in 8-bit blocks: off by no more than half a step of their block, half the traffic of bf16, gradients of what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential, gathered
from rayzero3.engine.blocks import BLOCK
from tests.engine.models import full_values
from tests.ranks import run_ranks


class Adapted(nn.Module):
    """A frozen matrix of odd size, a frozen vector and a small trainable part."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(37, 37, generator=generator) * torch.logspace(-4, 1, 37)[:, None], requires_grad=False)
        self.shift = nn.Parameter(torch.randn(37, generator=generator), requires_grad=False)
        self.down = nn.Parameter(torch.randn(3, 37, generator=generator))
        self.up = nn.Parameter(torch.randn(37, 3, generator=generator))

    def forward(self, x):
        return x @ self.weight.T / 20 + self.shift + x @ self.down.T @ self.up.T / 20


def sharded(rank, world_size, dtype=torch.float32, blocks=True):
    layers = [Zero3Layer(Adapted(seed), rank, world_size, "cpu", dtype, name=str(seed), frozen_blocks=blocks) for seed in range(3)]
    return Zero3Sequential(layers)


def values(rank, world_size, dtype):
    model = sharded(rank, world_size, dtype)
    found = full_values(model)
    with gathered(model.layers[1]) as module:
        fetched = module.weight.clone()
    return found, fetched


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_within_half_a_step_of_its_block(world_size, dtype):
    for found, fetched in run_ranks(values, world_size, dtype):
        for seed in range(3):
            exact = Adapted(seed)
            flat, kept = exact.weight.flatten(), found[f"{seed}.weight"].flatten()
            for start in range(0, len(flat), BLOCK):
                part = slice(start, start + BLOCK)
                assert (kept[part] - flat[part]).abs().max() <= flat[part].abs().max() / 127 / 2 * 1.0001
            assert (kept != flat).any() and torch.equal(found[f"{seed}.shift"], exact.shift), "vectors keep their dtype"
        torch.testing.assert_close(fetched, found["1.weight"].to(dtype), rtol=0, atol=0)


def step(rank, world_size):
    model = sharded(rank, world_size)
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-2)
    x = torch.randn(4, 37, generator=torch.Generator().manual_seed(9)).requires_grad_()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, full_values(model), x.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_model_in_blocks_trains_as_the_plain_model_of_the_same_values(world_size):
    plain = nn.Sequential(*(Adapted(seed) for seed in range(3)))
    with torch.no_grad():
        for index, module in enumerate(plain):
            module.weight.copy_(run_ranks(values, 1, torch.float32)[0][0][f"{index}.weight"])
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    x = torch.randn(4, 37, generator=torch.Generator().manual_seed(9)).requires_grad_()
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, found, grad in run_ranks(step, world_size):
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["2.weight"], plain[2].weight, rtol=0, atol=0)


def traffic(rank, world_size, blocks):
    with torch.device("meta"):
        module = nn.Linear(512, 512, bias=False).requires_grad_(False).to(torch.bfloat16)
    fill = lambda name, tensor, generator: tensor.normal_(generator=generator)  # noqa: E731
    layer = Zero3Layer(module, rank, world_size, "cpu", torch.bfloat16, name="", initialize=fill, frozen_blocks=blocks)
    layer.fetch_params()
    value = layer.module.weight[3, :5].clone()
    layer.cleanup_params()
    return layer.comm.bytes_sent["fetch"], layer.frozen[0].chunk.nbytes, value


def test_blocks_travel_with_half_the_bytes_of_bf16_and_lie_in_half_the_memory():
    for (sent, held, _), (wide_sent, wide_held, _) in zip(run_ranks(traffic, 2, True), run_ranks(traffic, 2, False), strict=True):
        assert sent / wide_sent == held / wide_held == (1 + 4 / BLOCK) / 2 < 0.51


def write(rank, world_size):
    model = sharded(rank, world_size)
    before = full_values(model)
    with gathered(model.layers[0]) as module:
        module.weight[:7] = 1.0
    return before["0.weight"], full_values(model)["0.weight"]


def test_what_is_written_is_kept_and_the_rest_stays_as_it_was():
    for before, after in run_ranks(write, 2):
        assert torch.allclose(after[:7], torch.ones(7, 37), rtol=1e-2)
        untouched = slice((7 * 37 // BLOCK + 1) * BLOCK, None)
        assert torch.equal(after.flatten()[untouched], before.flatten()[untouched])
