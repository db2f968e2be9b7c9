"""On a GPU too the mathematics is that of plain mixed precision with torch's AdamW."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rayzero3.engine import LossScaler, Zero3Adam, Zero3Layer, Zero3Sequential, shard_model
from tests.engine.models import Block, full_grads, full_values, language_model, mean_loss, tokens
from tests.gpu.plain import Plain, assert_close_by_layer, sharded

STEPS = 20
GRADIENT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of each layer's norm. A library may take another kernel for weights that lie elsewhere, so rounding differs."""
LOSS_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def twenty_steps(device, dtype, offload=False):
    layers = language_model(width=64, vocabulary=97)
    plain, model = Plain(layers, device, dtype), sharded(layers, device, dtype, offload)
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-3)
    first = last = None
    for step in range(STEPS):
        batch = tokens(step % 4, 8, 16, 97).to(device)
        loss, expected = mean_loss(model, batch), mean_loss(plain.module, batch)
        assert abs(loss - expected) <= LOSS_BOUND[dtype] * expected, f"step {step}"
        optimizer.zero_grad()
        loss.backward()
        wanted = plain.backward(expected)
        if step == 0:
            if offload and device.type == "cuda":
                torch.cuda.synchronize(device)
            assert_close_by_layer(full_grads(model), wanted, GRADIENT_BOUND[dtype])
            first = float(loss)
        optimizer.step()
        plain.step()
        last = float(loss)
    assert last < first, "it learns"


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("dtype", GRADIENT_BOUND, ids=str)
def test_twenty_steps_are_those_of_plain_mixed_precision(device, dtype, offload):
    twenty_steps(device, dtype, offload)


def fp16_with_an_overflow(device):
    layers = language_model(width=64, vocabulary=97)
    plain, model = Plain(layers, device, torch.float16), sharded(layers, device, torch.float16)
    scaler = LossScaler(device, initial=2.0**10, growth_steps=3)
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-3, scaler=scaler)
    scales = []
    for step in range(6):
        batch = tokens(step, 8, 16, 97).to(device)
        before = full_values(model)
        optimizer.zero_grad()
        (mean_loss(model, batch) * scaler.scale * (torch.inf if step == 1 else 1.0)).backward()
        norm = optimizer.clip(1.0)
        optimizer.step()
        scales.append(float(scaler.scale))
        after = full_values(model)
        if step == 1:
            assert not torch.isfinite(norm) and int(scaler.skips) == 1
            assert all(torch.equal(before[name], after[name]) for name in before), "a step that overflowed changes nothing"
            continue
        assert torch.isfinite(norm) and not torch.equal(before["1.up.weight"], after["1.up.weight"])
        scale = scales[-2] if scales[:-1] else 2.0**10
        wanted = plain.backward(mean_loss(plain.module, batch) * scale)
        for master in plain.masters.values():
            master.grad /= scale
        expected = torch.stack([grad.norm() for grad in wanted.values()]).norm()
        assert abs(norm - expected) <= 2e-2 * expected
        nn.utils.clip_grad_norm_(plain.masters.values(), 1.0)
        plain.step()
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**10, 2.0**10]
    assert optimizer.updates == 5


def test_fp16_skips_a_step_that_overflows_and_halves_the_scale(device):
    fp16_with_an_overflow(device)


def encoder(device):
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 3, enable_nested_tensor=False)
    model = shard_model(copy.deepcopy(plain), ["layers.*"], device=device)
    plain = plain.to(device)
    x = torch.randn(4, 7, 32, device=device)
    for _ in range(2):
        loss, expected = model(x).square().mean(), plain(x).square().mean()
        assert abs(loss - expected) <= 1e-5 * expected
        loss.backward()
        expected.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm, found = torch.stack([grad.norm() for grad in wanted.values()]).norm(), full_grads(model)
    assert set(found) == set(wanted)
    assert all((found[name] - wanted[name]).norm() <= 1e-5 * norm for name in wanted)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert sum(flat.full_bytes for layer in model.all_layers() for flat in layer.flats) == 0


def test_shard_model_trains_torchs_own_transformer_encoder(device):
    encoder(device)


def compiled(device, backend):
    layers = language_model(width=64, vocabulary=97)
    plain = Plain(layers, device, torch.float32)
    modules = [torch.compile(layer, backend=backend) if isinstance(layer, Block) else layer for layer in copy.deepcopy(layers)]
    model = Zero3Sequential([Zero3Layer(module, 0, 1, device) for module in modules])
    batch = tokens(0, 8, 16, 97).to(device)
    for _ in range(2):
        for chunk in model.get_trainable_chunk():
            chunk.grad = None
        mean_loss(model, batch).backward()
        assert_close_by_layer(full_grads(model), plain.backward(mean_loss(plain.module, batch)), 1e-4)


def test_layers_compiled_by_inductor_have_the_gradients_of_a_plain_module(device):
    pytest.importorskip("triton", reason="inductor needs triton on GPUs")
    compiled(device, "inductor")
