"""FLOPs of a model, counted per type of layer; and the peaks of known GPUs, for MFU.

Letters: T = tokens of a sample, H = heads, d = channels of a head, I and O = inputs and outputs of a linear layer.

A multiplication and an addition are two FLOPs. What is counted is what torch's FlopCounterMode counts: products of matrices, and attention
in full, as if nothing were masked. Norms, activations and rotations are not.

Source: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B (MFU).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rayzero3.models import gpt_neox, llama

PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2.25e15, "fp16": 2.25e15},
    "H200": {"bf16": 9.89e14, "fp16": 9.89e14, "fp32": 6.7e13},
    "H100 PCIe": {"bf16": 7.56e14, "fp16": 7.56e14, "fp32": 5.1e13},
    "H100 NVL": {"bf16": 8.35e14, "fp16": 8.35e14, "fp32": 6.0e13},
    "H100": {"bf16": 9.89e14, "fp16": 9.89e14, "fp32": 6.7e13},
    "H800": {"bf16": 9.89e14, "fp16": 9.89e14, "fp32": 6.7e13},
    "A100": {"bf16": 3.12e14, "fp16": 3.12e14, "fp32": 1.95e13},
    "A800": {"bf16": 3.12e14, "fp16": 3.12e14, "fp32": 1.95e13},
    "L40S": {"bf16": 3.62e14, "fp16": 3.62e14, "fp32": 9.16e13},
    "L4": {"bf16": 1.21e14, "fp16": 1.21e14, "fp32": 3.03e13},
    "A10G": {"bf16": 7.0e13, "fp16": 7.0e13, "fp32": 3.5e13},
    "A10": {"bf16": 1.25e14, "fp16": 1.25e14, "fp32": 3.12e13},
    "RTX 4090": {"bf16": 1.65e14, "fp16": 1.65e14, "fp32": 8.26e13},
    "RTX 3090": {"bf16": 7.1e13, "fp16": 7.1e13, "fp32": 3.56e13},
    "V100": {"fp16": 1.25e14, "fp32": 1.57e13},
    "T4": {"fp16": 6.5e13, "fp32": 8.1e12},
    "MI300X": {"bf16": 1.307e15, "fp16": 1.307e15, "fp32": 1.634e14},
}
"""FLOP/s of one GPU by a part of its name and by dtype, dense, sums in fp32, as the makers' data sheets have them. First match counts."""


def peak_flops(device_name: str, compute_dtype: str) -> float | None:
    """FLOP/s of a GPU; None where it is not known, since a guess would make every MFU wrong."""
    return next((peaks.get(compute_dtype) for name, peaks in PEAKS.items() if name in device_name), None)


def forward_flops(module: nn.Module, tokens: int) -> dict[str, int]:
    """FLOPs of one sample of `tokens` tokens through a module of ours, by type of layer: `linear` and `attention`."""
    found = {"linear": 0, "attention": 0}
    for part in module.modules():
        if isinstance(part, nn.Linear):
            found["linear"] += 2 * tokens * part.in_features * part.out_features
        elif isinstance(part, gpt_neox.Attention):
            found["attention"] += 4 * tokens * tokens * part.dense.in_features
        elif isinstance(part, llama.Attention):
            found["attention"] += 4 * tokens * tokens * part.o_proj.in_features
    return found


def step_flops(modules: Iterable[nn.Module], tokens: int) -> int:
    """FLOPs of one sample in a training step: forward, gradients of inputs, and gradients of the weights that train. Recomputation is left out.

    Gradients of inputs count in every layer, in the first ones too, below which nothing may train.
    """
    total = 0
    for module in modules:
        forward = forward_flops(module, tokens)
        total += 2 * forward["linear"] + 3 * forward["attention"]
        total += sum(
            2 * tokens * part.in_features * part.out_features
            for part in module.modules()
            if isinstance(part, nn.Linear) and part.weight.requires_grad
        )
    return total


def foreign_step_flops(model: nn.Module, blocks: int, tokens: int) -> int:
    """As `step_flops`, of another library's model: every matrix but embeddings' is a product, and each block attends over what its config says."""
    config = model.config
    heads = getattr(config, "num_attention_heads", 0)
    channels = heads * (getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1))
    total = 3 * blocks * 4 * tokens * tokens * channels
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            total += 2 * tokens * weight.numel() * (3 if weight.requires_grad else 2)
    return total
