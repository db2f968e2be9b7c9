"""The allocator's own numbers against the formula, where nothing is estimated.

P parameters, b bytes of the compute dtype: 12 P between steps; in a step 16 P, and (1 + prefetch) layers, the last layer and two flat
gradients, all at b bytes. NCCL reduces in fp32, so with b < 4 the flat gradient in flight has an fp32 copy. What a plain module of the
same size needs for activations is measured, and the gradient of one parameter exists twice while it moves into the flat gradient.
"""

from __future__ import annotations

import pytest
import torch

from rayzero3.engine import Zero3Adam
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


def formula(model, dtype, prefetch):
    """Bytes of the formula in a step and between steps, padding included, activations and one parameter's gradient not."""
    sizes, b = [layer.trainable.layout.padded_numel for layer in model.layers], dtype.itemsize
    flat_gradients = 2 * max(sizes) * b + (4 * max(sizes) if b < 4 else 0)
    return 16 * sum(sizes) + (1 + prefetch) * max(sizes) * b + sizes[-1] * b + flat_gradients, 12 * sum(sizes)


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
    in_a_step, kept = formula(model, dtype, prefetch)
    one = max(slot.numel for layer in model.layers for slot in layer.trainable.layout.slots) * dtype.itemsize
    assert kept <= between <= kept + SLACK_BYTES
    assert kept // 12 * 16 <= peak <= in_a_step + activations + one + SLACK_BYTES


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_allocators_peak_is_within_the_formula_and_12_bytes_per_parameter_stay(device, dtype, prefetch):
    measured(device, dtype, prefetch)
