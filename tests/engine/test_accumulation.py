"""Both modes of accumulation give the gradient of the joined batch; holding sends once a step; recomputation changes nothing."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.engine.models import assert_grads_match, full_grads, language_model, mean_loss, shard, tokens
from tests.ranks import run_ranks

MICRO_BATCHES = 4


def accumulate(rank, world_size, hold, dtype):
    layers = language_model(tied=True)
    layers[2].scale.requires_grad_(False)
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size, dtype)
    sent = []
    for _ in range(2):
        model.comm.bytes_sent.clear()
        for chunk in model.get_trainable_chunk():
            chunk.grad = None
        plain.zero_grad()
        for micro in range(MICRO_BATCHES):
            batch = tokens(micro, 2 * world_size)
            last = micro == MICRO_BATCHES - 1
            with model.hold_gradients() if hold and not last else nullcontext():
                mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
            mean_loss(plain, batch).backward()
        sent.append(model.comm.bytes_sent["reduce"])
        if dtype is torch.float32:
            assert_grads_match(full_grads(model), plain)
    assert sent[0] == sent[1]
    return sent[0], {name: grad.clone() for name, grad in full_grads(model).items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_both_modes_give_the_same_gradient_and_holding_reduces_once(world_size):
    each = run_ranks(accumulate, world_size, False, torch.float32)[0]
    once = run_ranks(accumulate, world_size, True, torch.float32)[0]
    assert each[0] == MICRO_BATCHES * once[0]
    for name in each[1]:
        torch.testing.assert_close(each[1][name], once[1][name], rtol=1e-5, atol=1e-7)


def test_held_gradients_gather_in_fp32_under_bf16():
    each = run_ranks(accumulate, 2, False, torch.bfloat16)[0]
    once = run_ranks(accumulate, 2, True, torch.bfloat16)[0]
    assert once[0] == each[0] * 2 / MICRO_BATCHES, "once, in fp32, instead of four times in bf16"
    for name in each[1]:
        torch.testing.assert_close(each[1][name], once[1][name], rtol=2e-2, atol=1e-3)


def keep(rank, world_size, budget_bytes, reduce_once):
    """Two steps of some micro-batches; gradients, bytes fetched a step, and the most bytes of full parameters at once."""
    model = shard(language_model(tied=True), rank, world_size)
    most, optimizer = 0, torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)

    def look(*_):
        nonlocal most
        most = max(most, sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats))

    for layer in model.layers:
        layer.module.register_forward_hook(look)
        layer.module.register_full_backward_hook(look)
    for _ in range(2):
        model.comm.bytes_sent.clear()
        optimizer.zero_grad()
        with model.keep_fetched(budget_bytes):
            for micro in range(MICRO_BATCHES):
                with model.hold_gradients() if reduce_once and micro < MICRO_BATCHES - 1 else nullcontext():
                    mean_loss(model, tokens(micro, 2 * world_size)[2 * rank : 2 * rank + 2]).backward()
        assert not sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats)
        optimizer.step()
    sizes = {layer.label: layer.full_bytes for layer in model.layers}
    return full_grads(model), model.comm.bytes_sent["fetch"], most, sizes


@pytest.mark.parametrize("reduce_once", [False, True])
def test_layers_kept_within_a_budget_save_their_fetches_and_change_no_bit(reduce_once):
    world_size = 2
    without, sent, most, sizes = run_ranks(keep, world_size, 0, reduce_once)[0]
    block = sizes["2"]
    for budget, kept in ((block - 1, 0), (block, 1), (2 * block + 1, 2), (2**30, 3)):
        grads, now, peak, _ = run_ranks(keep, world_size, budget, reduce_once)[0]
        saved = (2 * MICRO_BATCHES - 1) * kept * block * (world_size - 1) / world_size
        assert sent - now == saved, f"{kept} blocks kept"
        assert peak <= most + min(budget, kept * block)
        assert all(torch.equal(grads[name], without[name]) for name in without)


def recompute(rank, world_size):
    layers = language_model()
    layers[1].scale.requires_grad_(False)
    layers[2].requires_grad_(False)
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    runs = []
    for layer in model.layers[1:4]:
        layer.recompute = True
        layer.module.register_forward_pre_hook(lambda *_, label=layer.label: runs.append(label))
    batch = tokens(0, 2 * world_size)
    for _ in range(2):
        runs.clear()
        for chunk in model.get_trainable_chunk():
            chunk.grad = None
        plain.zero_grad()
        mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
        mean_loss(plain, batch).backward()
        assert_grads_match(full_grads(model), plain)
        assert runs[:3] == ["1", "2", "3"] and sorted(runs[3:]) == ["1", "2", "3"]
        assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0
    with torch.no_grad():
        model(batch[:, :-1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputed_layers_with_frozen_parts_give_the_same_gradients(world_size):
    run_ranks(recompute, world_size)
