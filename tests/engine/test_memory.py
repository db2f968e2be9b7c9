"""Memory and traffic are the formula's: bytes between steps, layers alive at once, bytes sent per collective."""

from __future__ import annotations

import gc

import pytest
import torch

from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential, predict
from rayzero3.engine.layout import CHUNK_ALIGNMENT, SLOT_ALIGNMENT
from tests.engine.models import language_model, mean_loss, shard, tokens
from tests.ranks import run_ranks


def never_two_stages(rank, world_size):
    model = shard(language_model(blocks=6), rank, world_size)
    layer = model.layers[3]
    sizes, alive = {l.label: sum(f.layout.padded_numel * 4 for f in l.flats) for l in model.layers}, []
    for member in model.layers:
        def look(*_, **__):
            alive.append(sum(flat.allocated_bytes for other in model.layers for flat in other.flats))
        member.module.register_forward_hook(look)
        member.module.register_full_backward_pre_hook(look)
        member.module.register_full_backward_hook(look)
    batch = tokens(0, 2)
    for _ in range(2):
        mean_loss(model, batch).backward()
    assert max(alive) <= 2 * max(sizes.values()) + sizes["7"]
    layer.fetch_params()
    layer._order.reset()
    with torch.no_grad():
        model(batch[:, :-1])
    assert sum(flat.allocated_bytes for other in model.layers for flat in other.flats) == 0


def test_no_more_than_two_layers_and_the_last_are_whole():
    run_ranks(never_two_stages, 2)


def persistent_bytes(rank, world_size):
    model = shard(language_model(), rank, world_size)
    optimizer = Zero3Adam(model.get_trainable_chunk())
    mean_loss(model, tokens(0, 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.numel() > 1:
            held[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    parameters = sum(slot.numel for layer in model.layers for slot in layer.trainable.layout.slots)
    return sum(held.values()), parameters, sum(len(layer.trainable.layout.slots) for layer in model.layers), len(model.layers)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_between_steps_a_rank_holds_12_bytes_per_parameter_over_n(world_size):
    for held, parameters, slots, layers in run_ranks(persistent_bytes, world_size):
        padding = 12 * (slots * SLOT_ALIGNMENT / world_size + layers * CHUNK_ALIGNMENT)
        assert 12 * parameters / world_size <= held <= 12 * parameters / world_size + padding


def sent_bytes(rank, world_size):
    model = shard(language_model(), rank, world_size)
    optimizer = Zero3Adam(model.get_trainable_chunk())
    model.comm.bytes_sent.clear()
    mean_loss(model, tokens(0, 2)).backward()
    optimizer.step()
    each = {layer.label: layer.trainable.layout.chunk_numel * 4 * (world_size - 1) for layer in model.layers}
    assert model.comm.bytes_sent["fetch"] == 2 * sum(each.values()) - each["4"], "the last layer is fetched once"
    assert model.comm.bytes_sent["reduce"] == sum(each.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_sent_are_the_formula(world_size):
    run_ranks(sent_bytes, world_size)


OPTIONS = {
    "plain": {},
    "bf16 moments and an average": {"moment_dtype": torch.bfloat16, "average_decay": 0.9},
    "frozen but for biases": {"frozen": torch.float32},
    "frozen but for biases, in bf16": {"frozen": torch.bfloat16},
    "frozen but for biases, in blocks of int8": {"frozen": "blocks"},
}


def sharded_for(rank, world_size, frozen=None, **_):
    """The model, all of it trainable or its biases alone, the rest kept as `frozen` says."""
    modules = language_model(tied=frozen is None)
    for name, parameter in [named for module in modules for named in module.named_parameters() if frozen is not None]:
        parameter.requires_grad_(name.endswith("bias"))
        if not parameter.requires_grad and frozen != "blocks":
            parameter.data = parameter.data.to(frozen)
    return Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", frozen_blocks=frozen == "blocks") for module in modules])


def predicted(rank, world_size, options):
    """The prediction, a census between steps and in a step, and the most bytes of full parameters and full gradients that were seen."""
    model = sharded_for(rank, world_size, **options)
    optimizer = Zero3Adam(model.get_trainable_chunk(), **{name: value for name, value in options.items() if name != "frozen"})
    flats = [flat for layer in model.all_layers() for flat in layer.flats]
    most = {"layers": 0, "flat gradients": 0}

    def look(*_):
        most["layers"] = max(most["layers"], sum(flat.allocated_bytes for flat in flats))
        most["flat gradients"] = max(most["flat gradients"], sum(flat._grad.nbytes for flat in flats if flat._grad is not None))

    for layer in model.layers:
        layer.module.register_forward_hook(look)
        layer.module.register_full_backward_hook(look)
    for step in range(2):
        mean_loss(model, tokens(step, 2)).backward()
        if step == 1:
            in_step = census()
        optimizer.step()
        optimizer.zero_grad()
    return predict(model, optimizer), census(), in_step, most


def census():
    found = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and tensor.dtype is not torch.int64:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_printed_prediction_is_what_is_held(world_size, options):
    for memory, between, in_step, most in run_ranks(predicted, world_size, OPTIONS[options]):
        assert between == memory.between_steps
        assert in_step == memory.between_steps + memory.gradients
        assert memory.layers * 0.6 <= most["layers"] <= memory.layers
        assert 0 < most["flat gradients"] <= memory.flat_gradients
        if "frozen" in OPTIONS[options]:
            assert memory.parameters == 3 * (12 + 25 + 12), "the biases alone have a gradient and moments"
            assert f"/ {world_size} + {memory.frozen / 2**20:,.1f} MiB frozen" in str(memory)
        assert f"{memory.per_parameter} bytes x {memory.parameters:,} / {world_size}" in str(memory)
