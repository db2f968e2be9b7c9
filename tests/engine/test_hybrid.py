"""Hybrid sharding changes traffic and memory, never mathematics."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from rayzero3.checkpoint.format import Position, newest
from rayzero3.checkpoint.load import load
from rayzero3.checkpoint.save import save
from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential, hybrid_mesh
from rayzero3.train.loop import steps
from rayzero3.train.trainee import build
from tests.engine.models import full_values, language_model, mean_loss, tokens
from tests.jobs import VOCABULARY, random_batches, small_job
from tests.ranks import run_ranks

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=60)


def train(rank, world_size, shard_size, dtype, tied, steps=20):
    """Losses and norms of some steps, the weights, what was sent, and the bytes of chunks on this rank."""
    mesh = hybrid_mesh(shard_size, CPU, TIMEOUT)
    modules = language_model(tied=tied)
    if rank:
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    parameter.fill_(torch.nan)
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", dtype, group=mesh) for module in modules])
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-2)
    seen, comm = [], model.comm
    for step in range(steps):
        comm.bytes_sent.clear()
        optimizer.zero_grad()
        loss = mean_loss(model, tokens(step, 2 * world_size)[2 * rank : 2 * rank + 2])
        loss.backward()
        norm = optimizer.clip(1.0)
        optimizer.step()
        seen.append((float(comm.sum_rows(loss.detach().double().view(1), "loss")) / world_size, float(norm)))
    chunks = sum(chunk.numel() for chunk in model.get_trainable_chunk())
    return seen, full_values(model), dict(comm.bytes_sent), chunks, mesh is None


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_two_by_two_has_the_losses_and_norms_of_full_sharding_over_four(dtype, tied):
    whole = run_ranks(train, 4, 4, dtype, tied)
    hybrid = run_ranks(train, 4, 2, dtype, tied)
    bound = 1e-6 if dtype is torch.float32 else 1e-3
    for rank in range(4):
        losses, norms = (torch.tensor(column) for column in zip(*hybrid[rank][0], strict=True))
        expected = [torch.tensor(column) for column in zip(*whole[0][0], strict=True)]
        torch.testing.assert_close(losses, expected[0], rtol=bound, atol=0)
        torch.testing.assert_close(norms, expected[1], rtol=10 * bound, atol=0)
        assert all(torch.equal(value, hybrid[0][1][name]) for name, value in hybrid[rank][1].items()), "all copies are the same"
    assert not hybrid[0][4] and whole[0][4]


def test_a_copy_costs_memory_and_saves_traffic_between_nodes():
    whole, hybrid = run_ranks(train, 4, 4, torch.float32, False, 1)[0], run_ranks(train, 4, 2, torch.float32, False, 1)[0]
    assert hybrid[3] == pytest.approx(2 * whole[3], rel=0.05)
    for kind in ("fetch", "reduce"):
        assert hybrid[2][kind] == pytest.approx(whole[2][kind] * (1 / 2) / (3 / 4), rel=0.05)


def test_full_sharding_takes_over_where_the_group_does_not_divide_the_ranks():
    assert all(rank[4] for rank in run_ranks(train, 3, 2, torch.float32, False, 1))


def go(rank, world_size, job, until, resume):
    """As the trainer does: some steps from the newest checkpoint, then a save."""
    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    model, optimizer = trainee.model, trainee.optimizer
    position = load(*newest(job.run_folder / "checkpoints"), job, model, optimizer) if resume else Position(0, 0)
    losses = []
    for result in steps(job, trainee, random_batches(job, position.step, rank, world_size), position.step, position.samples, CPU):
        losses.append(float(result.loss))
        if result.step == until:
            save(job.run_folder / "checkpoints", job, model, optimizer, Position(result.step, result.samples), 1)
            break
    return losses


def test_one_copy_is_saved_and_any_sharding_goes_on_from_it(tmp_path):
    undisturbed = run_ranks(go, 1, small_job(tmp_path / "a"), 10, False)[0]
    job = small_job(tmp_path / "b", workers={"shard_group": 2})
    first = run_ranks(go, 4, job, 5, False)
    assert len(newest(job.run_folder / "checkpoints")[1].files) == 2
    second = run_ranks(go, 3, job, 7, True)
    third = run_ranks(go, 4, job, 10, True)
    assert first[0] == first[3]
    assert first[0] + second[0] + third[0] == pytest.approx(undisturbed, rel=1e-5)
