"""Zero3Adam is AdamW with the decay where it belongs; the loss scaler's verdict is the same on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rayzero3.engine import LossScaler, Zero3Adam
from rayzero3.errors import StateError
from tests.engine.models import full_values, language_model, mean_loss, shard, tokens
from tests.ranks import run_ranks


def weight_decay(rank, world_size):
    layers = language_model(tied=True)
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    matrices = [parameter for parameter in plain.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in plain.parameters() if parameter.dim() < 2]
    theirs = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    mine = Zero3Adam(model.get_trainable_chunk(), lr=1e-2, weight_decay=0.3)
    for step in range(4):
        batch = tokens(step, 2 * world_size)
        mine.zero_grad()
        theirs.zero_grad()
        mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
        mean_loss(plain, batch).backward()
        if step == 2:
            for chunk in mine.chunks:
                chunk.grad.mul_(float("inf"))
            mine.clip()
            mine.step()
            continue
        mine.step()
        theirs.step()
    for name, value in full_values(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_decay_spares_norms_and_biases_and_a_skipped_step_decays_nothing(world_size):
    run_ranks(weight_decay, world_size)


def scaled(rank, world_size):
    """fp16 with an overflow on rank 1 alone; the scale, the skips and the weights agree on all ranks."""
    model = shard(language_model(), rank, world_size, torch.float16)
    scaler = LossScaler("cpu", initial=2.0**10, growth_steps=3)
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-3, scaler=scaler)
    history, weights = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = mean_loss(model, tokens(step, 2))
        boom = 1e6 if step == 1 and rank == 1 else 1.0
        (loss * scaler.scale * boom).backward()
        norm = optimizer.clip(1.0)
        assert (int(optimizer.first_overflow) >= 0) == (step == 1)
        optimizer.step()
        history.append((float(scaler.scale), int(scaler.skips), bool(torch.isfinite(norm))))
        weights.append(full_values(model)["1.up.weight"])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    return history, optimizer.updates


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale():
    first, second = run_ranks(scaled, 2)
    assert first == second
    history, updates = first
    assert history[0] == (1024.0, 0, True) and history[1] == (512.0, 1, False) and updates == 5
    assert history[4] == (1024.0, 0, True), "three good steps double it"


def unscaled_norm(rank, world_size):
    norms = []
    for scale in (1.0, 2.0**12):
        model = shard(language_model(), rank, world_size)
        scaler = LossScaler("cpu", initial=scale)
        optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-2, scaler=scaler)
        (mean_loss(model, tokens(0, 2)) * scaler.scale).backward()
        norms.append(float(optimizer.clip(0.1)))
        optimizer.step()
        norms.append(full_values(model)["1.up.weight"])
    assert norms[0] == pytest.approx(norms[2], rel=1e-6)
    torch.testing.assert_close(norms[1], norms[3], rtol=1e-5, atol=1e-7)


def test_the_scale_changes_neither_norm_nor_update():
    run_ranks(unscaled_norm, 2)


def test_too_many_skips_in_a_row_are_an_error():
    scaler = LossScaler("cpu", most_skips=3)
    for _ in range(3):
        scaler.check()
        scaler.learn(torch.tensor(1.0))
    with pytest.raises(StateError, match="overflowed 3 steps in a row, first in layer 2; the loss scale is down to 8192"):
        scaler.check("2")
    again = LossScaler("cpu")
    again.restore(scaler.numbers())
    assert again.numbers() == scaler.numbers() == {"scale": 8192.0, "skips": 3, "good": 0}
    scaler.learn(torch.tensor(0.0))
    scaler.check()


def moving_average(rank, world_size):
    """Ours against the definition; a skipped step moves nothing; inside `averaged` the model computes with it."""
    plain = nn.Sequential(*language_model())
    model = shard(language_model(), rank, world_size)
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-2, average_decay=0.9)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    average = {name: value.detach().clone() for name, value in plain.named_parameters()}
    for step in range(6):
        batch, factor = tokens(step, 2), torch.inf if step == 3 else 1.0
        optimizer.zero_grad()
        reference.zero_grad()
        (mean_loss(model, batch) * factor).backward()
        optimizer.clip()
        optimizer.step()
        if step != 3:
            mean_loss(plain, batch).backward()
            reference.step()
            for name, value in plain.named_parameters():
                average[name].lerp_(value.detach(), 0.1)
    now = full_values(model)
    with optimizer.averaged():
        for name, value in full_values(model).items():
            torch.testing.assert_close(value, average[name], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, now[name]) for name, value in full_values(model).items()), "the weights are back"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_moving_average_is_that_of_the_weights_and_a_skipped_step_leaves_it(world_size):
    run_ranks(moving_average, world_size)


def half_moments(rank, world_size, moment_dtype):
    model = shard(language_model(), rank, world_size)
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-2, betas=(0.9, 0.95), moment_dtype=moment_dtype)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = mean_loss(model, tokens(step % 4, 4))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    moments = [value for chunk in optimizer.chunks for value in optimizer.tensors(chunk).values()]
    return losses, sum(value.nbytes for value in moments), sum(chunk.numel() for chunk in optimizer.chunks)


def test_bf16_moments_take_half_the_memory_and_follow_fp32():
    whole, half = (run_ranks(half_moments, 2, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert whole[1] == 8 * whole[2] and half[1] == 4 * half[2]
    assert half[0] == pytest.approx(whole[0], rel=2e-2)
    assert whole[0][-1] < 0.7 * whole[0][0]
