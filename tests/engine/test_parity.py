"""The mathematics is that of one process: losses, gradients and weights of a plain module on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential
from tests.engine.models import assert_grads_match, full_grads, full_values, language_model, mean_loss, shard, tokens
from tests.ranks import run_ranks

SAMPLES = 8


def part(batch, rank, world_size):
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size]


def sgd_ten_steps(rank, world_size, tied):
    layers = language_model(tied=tied)
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    mine, theirs = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(10):
        batch = tokens(step, SAMPLES)
        mine.zero_grad()
        theirs.zero_grad()
        loss = mean_loss(model, part(batch, rank, world_size))
        loss.backward()
        expected = mean_loss(plain, batch)
        expected.backward()
        total = model.comm.sum_rows(loss.detach().view(1), "test")[0] / world_size
        assert abs(total - expected) <= 1e-5 * expected
        assert_grads_match(full_grads(model), plain)
        mine.step()
        theirs.step()
    values = full_values(model)
    assert set(values) == set(dict(plain.named_parameters()))
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.data, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_ten_steps_of_sgd_equal_one_process(world_size, tied):
    run_ranks(sgd_ten_steps, world_size, tied)


def seed_blocks(rank, world_size, dtype):
    import torch.distributed as dist

    class model_cfg:
        layers = language_model()

    device = torch.device("cpu")
    data_loader = [{"input": part(tokens(step, SAMPLES), rank, world_size)[:, :-1]} for step in range(3)]

    modules = []
    for layer in model_cfg.layers:
        zl = Zero3Layer(module=layer.to(device), rank=dist.get_rank(), world_size=dist.get_world_size(), device=device, dtype=dtype)
        modules.append(zl)
    model = Zero3Sequential(modules)

    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-4)
    losses = []
    for batch in data_loader:
        optimizer.zero_grad()
        loss = model(batch["input"]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.dtype)
        assert all(chunk.dtype is torch.float32 and torch.isfinite(chunk).all() for chunk in model.get_trainable_chunk())
    return losses, full_values(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_seed_blocks_run_as_written(dtype):
    (dtypes, values), _ = run_ranks(seed_blocks, 2, dtype)
    assert dtypes == [dtype] * 3
    plain = nn.Sequential(*language_model())
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        plain(tokens(step, SAMPLES)[:, :-1]).mean().backward()
        optimizer.step()
    start = nn.Sequential(*language_model())
    moved = {name: parameter.data - start.get_parameter(name).data for name, parameter in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert (values[name] - start.get_parameter(name).data).abs().max() > 0
        if dtype is torch.float32:
            torch.testing.assert_close(values[name], parameter.data, rtol=1e-5, atol=1e-6)
        else:
            agree = (torch.sign(values[name] - start.get_parameter(name).data) == torch.sign(moved[name])).float().mean()
            assert agree > 0.8, f"{name}: the update points elsewhere"


def accumulate(rank, world_size):
    layers = language_model()
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    for step in range(3):
        batch = tokens(step, SAMPLES)
        mean_loss(model, part(batch, rank, world_size)).backward()
        mean_loss(plain, batch).backward()
    assert_grads_match(full_grads(model), plain)


def test_gradients_accumulate_over_backwards():
    run_ranks(accumulate, 2)


def accumulate_small(rank, world_size):
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.weight * x

    model = shard([Weight()], rank, world_size, dtype=torch.bfloat16)
    model(torch.tensor([1.0])).sum().backward()
    for _ in range(1000):
        model(torch.tensor([1e-3])).sum().backward()
    grad = full_grads(model)["0.weight"]
    assert abs(grad.item() - 2.0) < 5e-3


def test_main_gradients_accumulate_in_fp32_under_bf16():
    run_ranks(accumulate_small, 2)


def clip_and_norm(rank, world_size):
    layers = language_model()
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    mine, theirs = Zero3Adam(model.get_trainable_chunk(), lr=1e-2), torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(5):
        batch = tokens(step, SAMPLES)
        mine.zero_grad()
        theirs.zero_grad()
        mean_loss(model, part(batch, rank, world_size)).backward()
        mean_loss(plain, batch).backward()
        norm = mine.clip(0.3)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        assert abs(norm - expected) <= 1e-6 * expected or step > 0
        assert expected > 0.3
        mine.step()
        theirs.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full_values(model)[name], parameter.data, rtol=1e-4, atol=1e-5)
    before = full_values(model)
    steps = [int(mine.state[chunk]["step"]) for chunk in mine.chunks]
    mine.zero_grad()
    (mean_loss(model, part(batch, rank, world_size)) * torch.inf).backward()
    assert not torch.isfinite(mine.clip(0.3))
    mine.step()
    after = full_values(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [int(mine.state[chunk]["step"]) for chunk in mine.chunks] == steps


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_global_norm_and_clipping_are_those_of_one_process_and_infinity_updates_nothing(world_size):
    run_ranks(clip_and_norm, world_size)
