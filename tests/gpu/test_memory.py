"""The allocator's own numbers against the formula, where nothing is estimated.

P parameters: 12 P between steps; in a step what `predict` says: 16 P, (1 + prefetch) layers, the last layer, two flat gradients and what
arrives for the one in flight. What a plain module of the same size needs for activations is measured, and the gradient of one parameter exists twice while it moves into the flat gradient.
"""

from __future__ import annotations

import pytest
import torch

from rayzero3.engine import Zero3Adam, predict
from tests.engine.models import language_model, mean_loss, tokens
from tests.gpu.plain import Plain, sharded

WIDTH, VOCABULARY, BLOCKS, SLACK_BYTES = 1024, 512, 6, 4 * 2**20


def activation_bytes(layers, batch, device, dtype):
    """What a plain module keeps from its forward for its backward; warms up what the libraries allocate once."""
    plain = Plain(layers, device, dtype).module
    for _ in range(2):
        plain.zero_grad()
        before = torch.cuda.memory_allocated(device)
        loss = mean_loss(plain, batch)
        kept = torch.cuda.memory_allocated(device) - before
        loss.backward()
        del loss
    return kept


def measured(device, dtype, prefetch):
    layers = language_model(WIDTH, VOCABULARY, BLOCKS)
    batch = tokens(0, 2, 8, VOCABULARY).to(device)
    activations = activation_bytes(layers, batch, device, dtype)
    base = torch.cuda.memory_allocated(device)
    model = sharded(layers, device, dtype, prefetch=prefetch)
    optimizer = Zero3Adam(model.get_trainable_chunk())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(device)
        mean_loss(model, batch).backward()
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    peak, between = torch.cuda.max_memory_allocated(device) - base, torch.cuda.memory_allocated(device) - base
    memory = predict(model, optimizer)
    one = max(slot.numel for layer in model.layers for slot in layer.trainable.layout.slots) * dtype.itemsize
    assert memory.between_steps <= between <= memory.between_steps + SLACK_BYTES
    assert memory.between_steps + memory.gradients <= peak <= memory.in_step + activations + one + SLACK_BYTES


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_allocators_peak_is_within_the_formula_and_12_bytes_per_parameter_stay(device, dtype, prefetch):
    measured(device, dtype, prefetch)
