"""Outside its forward a parameter is a chunk: using it is an error that says what to do, never a crash; `gathered` makes it whole."""

from __future__ import annotations

import pytest
import torch

from rayzero3.engine import Zero3Adam, gathered
from rayzero3.errors import StateError
from tests.engine.models import full_values, language_model, mean_loss, shard, tokens
from tests.ranks import run_ranks


def use_outside(rank, world_size):
    model = shard(language_model(tied=True), rank, world_size)
    block, head = model.layers[1].module, model.layers[-1].module
    for use in (
        lambda: block.up.weight.sum(),
        lambda: block.up.weight + 1,
        lambda: torch.nn.functional.linear(torch.ones(1, 12), block.up.weight),
        lambda: block(torch.ones(1, 12)),
        lambda: block.up.weight.data,
        lambda: block.up.weight.add_(1),
        lambda: list(block.state_dict()),
        lambda: torch.optim.SGD(model.parameters(), lr=1.0).step() or [p.zero_() for p in model.parameters()],
    ):
        with pytest.raises(StateError, match=r"parameter \d.*layer is not fetched.*gathered"):
            use()
    with pytest.raises(StateError, match="parameter 0.weight can't be used in sum"):
        head.weight.sum()
    assert (block.up.weight.shape, block.up.weight.dtype, block.up.weight.numel()) == ((25, 12), torch.float32, 300)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(parameter.numel() for parameter in torch.nn.ModuleList(language_model(tied=True)).parameters())
    assert "1.up.weight" in repr(block.up.weight)


def test_a_parameter_used_outside_its_forward_is_an_error_that_names_it():
    run_ranks(use_outside, 2)


def read_and_write(rank, world_size, dtype):
    model = shard(language_model(tied=True), rank, world_size, dtype)
    plain = dict(torch.nn.ModuleList(language_model(tied=True)).named_parameters())
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-3)
    with gathered(model.layers[1]) as block:
        torch.testing.assert_close(block.up.weight.float(), plain["1.up.weight"].data, rtol=1e-2, atol=1e-2)
        block.up.weight[2] = 7.0
    with gathered(model.layers[-1]) as head:
        head.weight.zero_()
    values = full_values(model)
    expected = plain["1.up.weight"].data.clone()
    expected[2] = 7.0
    assert torch.equal(values["1.up.weight"], expected), "what was not written keeps its fp32 bits"
    assert not values["0.weight"].any()
    with pytest.raises(StateError, match="not fetched"):
        model.layers[1].module.up.weight.sum()
    mean_loss(model, tokens(0, 2)).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_parameters_are_readable_and_writable(dtype):
    run_ranks(read_and_write, 2, dtype)


def last_layer_is_readable(rank, world_size):
    """Between forward and backward the last layer is fetched, so a term on its weight gets its gradient."""
    model = shard(language_model(), rank, world_size)
    batch = tokens(0, 2)
    loss = mean_loss(model, batch) + model.layers[-1].module.weight.square().sum()
    loss.backward()
    layers = torch.nn.Sequential(*language_model())
    (mean_loss(layers, batch) + layers[-1].weight.square().sum()).backward()
    grad = model.comm.gather_rows(model.layers[-1].trainable.chunk.grad, "test").view(-1)[: layers[-1].weight.numel()].view_as(layers[-1].weight)
    torch.testing.assert_close(grad, layers[-1].weight.grad)


def test_a_term_on_the_weight_of_the_layer_that_stays_fetched_counts():
    run_ranks(last_layer_is_readable, 2)
