"""Simulated scale: as one rank of a fake group of up to 1,024, the engine holds what the formula says. No other rank exists."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential
from rayzero3.engine.layout import CHUNK_ALIGNMENT, SLOT_ALIGNMENT
from tests.engine.models import Block
from tests.ranks import run_ranks

WIDTH, LAYERS = 256, 12


def held_bytes():
    """Bytes of all storages that live tensors of more than one element use."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.numel() > 1 and not found.is_meta:
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def one_rank_of(rank, world_size, fake_rank, fake_size):
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=fake_rank, world_size=fake_size, store=FakeStore())

    def initialize(name, tensor, generator):
        tensor.normal_(generator=generator)

    with torch.device("meta"):
        modules = [Block(WIDTH) for _ in range(LAYERS)]
    parameters = sum(parameter.numel() for module in modules for parameter in module.parameters())
    slots = sum(len(list(module.parameters())) for module in modules)
    layers = [Zero3Layer(module, fake_rank, fake_size, "cpu", name=str(i), initialize=initialize) for i, module in enumerate(modules)]
    del modules
    model = Zero3Sequential(layers)
    optimizer = Zero3Adam(model.get_trainable_chunk())
    x = torch.ones(1, WIDTH)
    found = {}
    for step in range(2):
        model(x).sum().backward()
        found["in a step"] = held_bytes() - x.nbytes
        optimizer.step()
        optimizer.zero_grad()
    found["between steps"] = held_bytes() - x.nbytes
    padding = slots * SLOT_ALIGNMENT / fake_size + LAYERS * CHUNK_ALIGNMENT
    return found, parameters / fake_size, padding


@pytest.mark.parametrize(("fake_rank", "fake_size"), [(0, 8), (7, 8), (63, 64), (0, 1024), (1023, 1024)])
def test_a_rank_of_many_holds_12_bytes_per_parameter_over_n_and_16_in_a_step(fake_rank, fake_size):
    ((found, share, padding),) = run_ranks(one_rank_of, 1, fake_rank, fake_size)
    for when, each in (("between steps", 12), ("in a step", 16)):
        assert found[when] <= each * (share * 1.02 + padding), when
        assert found[when] >= each * share * 0.98, when
