"""A weight that several layers use is stored, fetched and reduced once, and learns as in one process."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from rayzero3.engine import Zero3Layer, Zero3Sequential
from rayzero3.errors import StateError
from tests.engine.models import compare, full_grads, language_model
from tests.ranks import run_ranks


def tied(rank, world_size):
    model = compare(rank, world_size, language_model(vocabulary=13, tied=True))
    names = [layer.full_name(slot.name) for layer in model.all_layers() for flat in layer.flats for slot in flat.layout.slots]
    assert names.count("0.weight") == 1 and "4.weight" not in names
    assert len(model.get_trainable_chunk()) == len({id(chunk) for chunk in model.get_trainable_chunk()}) == 4


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_tied_head_is_stored_and_reduced_once(world_size):
    run_ranks(tied, world_size)


def wrapped_twice(rank, world_size):
    torch.manual_seed(0)
    module, width = nn.Linear(12, 12), 12
    plain = copy.deepcopy(module)
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu") for _ in range(2)])
    x = torch.ones(2, width)
    model(x).sum().backward()
    plain(plain(x)).sum().backward()
    grads = full_grads(model)
    assert set(grads) == {"0.weight", "0.bias"}
    torch.testing.assert_close(grads["0.weight"], plain.weight.grad)
    torch.testing.assert_close(grads["0.bias"], plain.bias.grad)
    del model
    gc.collect()
    with pytest.raises(StateError, match="weight has no values; it belonged to a Zero3Layer that is gone"):
        Zero3Layer(module, rank, world_size, "cpu")


def test_a_module_wrapped_twice_is_tied_and_one_of_a_layer_that_is_gone_is_refused():
    run_ranks(wrapped_twice, 2)


class TiedInside(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tied_block(rank, world_size):
    layers = language_model()
    layers[1], layers[2] = TiedInside(12), TiedInside(12)
    layers[3].share = layers[2].first.bias
    compare(rank, world_size, layers)


def test_a_weight_tied_within_a_layer_and_a_bias_tied_across_layers():
    run_ranks(tied_block, 2)
