"""torch.compile, layer by layer: the same names and gradients, everything freed, and one graph for layers of one shape.

The backend is aot_eager: what the engine meets is the same as with inductor, whose C++ takes half a minute to compile on CPUs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rayzero3.engine import Zero3Layer, Zero3Sequential, shard_model
from tests.engine.models import Block, assert_grads_match, full_grads, full_values, language_model, mean_loss, tokens
from tests.ranks import run_ranks

STEPS = 4


def compiled(module, way, backend):
    """A copy that is compiled; `wrapped` puts a module of torch's around it, which `in place` does not."""
    if way == "wrapped":
        return torch.compile(copy.deepcopy(module), backend=backend)
    module = copy.deepcopy(module)
    module.compile(backend=backend)
    return module


def steps_and_graphs(rank, world_size, way, recompute, tied, dtype):
    """Some steps of SGD against the plain module, then an evaluation; in bf16 one step, to 5 % of each layer's norm."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = language_model(blocks=3, tied=tied)
    plain = nn.Sequential(*copy.deepcopy(layers)).to(dtype)
    modules = [compiled(layer, way, counter) if isinstance(layer, Block) else layer for layer in layers]
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", dtype, recompute=recompute) for module in modules])
    assert set(full_values(model)) == set(dict(plain.named_parameters())), "names do not depend on compilation"
    mine, theirs = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    counts = []
    for step in range(STEPS if dtype is torch.float32 else 1):
        batch = tokens(step, 2 * world_size)
        mine.zero_grad()
        theirs.zero_grad()
        mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
        mean_loss(plain, batch).backward()
        assert_grads_match(full_grads(model), plain, bound=1e-6 if dtype is torch.float32 else 0.05)
        assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0
        mine.step()
        theirs.step()
        counts.append(counter.frame_count)
    with torch.no_grad():
        assert abs(mean_loss(model, batch[:2]) - mean_loss(plain, batch[:2])) <= (1e-5 if dtype is torch.float32 else 0.05)
    assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0
    assert counts == [1] * len(counts), "three blocks of one shape share one graph, and later steps compile nothing"
    assert counter.frame_count <= 2, "evaluation adds one"


@pytest.mark.parametrize(("world_size", "way"), [(1, "in place"), (2, "wrapped")])
def test_compiled_layers_have_the_gradients_of_a_plain_module_and_share_one_graph(world_size, way):
    run_ranks(steps_and_graphs, world_size, way, False, False, torch.float32)


def test_compiled_layers_that_recompute_and_whose_ends_are_tied_do_too():
    run_ranks(steps_and_graphs, 2, "in place", True, True, torch.float32)


def test_compiled_layers_compute_in_bf16():
    run_ranks(steps_and_graphs, 1, "wrapped", False, False, torch.bfloat16)


def names_and_values(rank, world_size):
    def initialize(name, tensor, generator):
        tensor.normal_(generator=generator)

    found = []
    for way in ("not", "wrapped", "in place"):
        with torch.device("meta"):
            block = Block(5)
        module = block if way == "not" else compiled(block, way, "aot_eager")
        found.append(full_values(Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", name="7", initialize=initialize)])))
    plain, *others = found
    for other in others:
        assert set(other) == set(plain)
        assert all(torch.equal(other[name], plain[name]) for name in plain)


def test_initial_weights_do_not_depend_on_compilation():
    run_ranks(names_and_values, 1)


class Ends(nn.Module):
    """An embedding and a head that no glob names, around two blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(4, 6), nn.ModuleList(Block(6) for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled_parts(rank, world_size):
    torch.manual_seed(0)
    plain = Ends()
    model = copy.deepcopy(plain)
    model.head = compiled(model.head, "wrapped", "aot_eager")
    model.blocks[0] = compiled(model.blocks[0], "wrapped", "aot_eager")
    model.blocks[1].compile(backend="aot_eager")
    sharded = shard_model(model, ["blocks.*"], device="cpu")
    assert [layer.name for layer in sharded.all_layers()] == ["embed", "blocks.0", "blocks.1", "head"]
    x = torch.randn(3, 4)
    for part in (sharded, plain):
        part(x).square().mean().backward()
    assert_grads_match(full_grads(sharded), plain)


def test_shard_model_takes_compiled_blocks_and_a_compiled_head():
    run_ranks(compiled_parts, 1)
