"""FLOPs are those that torch's own counter counts; an unknown GPU has no peak."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rayzero3.config import GptNeox, Llama, LoraSection, TuneSection
from rayzero3.models.build import layers_of
from rayzero3.models.context import Context
from rayzero3.models.dropout import DropoutKeys
from rayzero3.models.flops import PEAKS, foreign_step_flops, forward_flops, peak_flops, step_flops
from rayzero3.models.lora import add_lora
from rayzero3.models.tune import freeze
from tests.models.test_families import SMALL, reference

LENGTH = 24
SECTIONS = [
    GptNeox(layers=2, width=32, heads=4, vocab_size=50),
    Llama(layers=2, width=32, heads=4, key_value_heads=2, vocab_size=50, tie_embeddings=True),
    Llama(layers=1, width=32, heads=2, head_size=8, vocab_size=50),
]
TUNES = [TuneSection(), TuneSection(parameters="biases"), TuneSection(parameters=r".*\.layers\.0\..*"), TuneSection(lora=LoraSection(rank=3))]


def layers(section, tune):
    parts = layers_of(section, 50)
    if tune.lora:
        add_lora(parts[1:-1], tune.lora, DropoutKeys(0))
    freeze(parts, tune, "fp32")
    return [module for _, module in parts]


def run(modules, backward):
    """A forward, and a backward to the inputs of the first block as well, on the meta device."""
    x = modules[0](torch.zeros((1, LENGTH), dtype=torch.int64, device="meta")).requires_grad_()
    for module in modules[1:]:
        x = module(x, Context())
    if backward:
        x.sum().backward()


@pytest.mark.parametrize("section", SECTIONS)
def test_a_forward_has_the_flops_that_torch_counts(section):
    modules = layers(section, TuneSection())
    with FlopCounterMode(display=False) as counter:
        run(modules, backward=False)
    assert sum(sum(forward_flops(module, LENGTH).values()) for module in modules) == counter.get_total_flops() > 0


@pytest.mark.parametrize("tune", TUNES)
@pytest.mark.parametrize("section", SECTIONS[:1])
def test_a_step_has_the_flops_that_torch_counts_whatever_trains(section, tune):
    modules = layers(section, tune)
    with FlopCounterMode(display=False) as counter:
        run(modules, backward=True)
    assert step_flops(modules, LENGTH) == counter.get_total_flops()


def test_another_librarys_model_is_counted_from_its_matrices_and_its_config():
    model = reference("Llama", {})
    ours = layers_of(Llama(layers=3, width=32, heads=4, mlp_width=48, vocab_size=SMALL["vocab_size"]), 0)
    assert foreign_step_flops(model, 3, LENGTH) == step_flops([module for _, module in ours], LENGTH)


def test_an_unknown_gpu_has_no_peak():
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == PEAKS["H100 PCIe"]["bf16"] < peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert peak_flops("NVIDIA A10G", "bf16") == PEAKS["A10G"]["bf16"]
    assert peak_flops("NVIDIA L40S", "fp16") == PEAKS["L40S"]["fp16"]
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Some Future GPU", "bf16") is None
