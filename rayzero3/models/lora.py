"""LoRA: low-rank adapters beside linear layers, for our models and for any other module.

Letters: B = samples, T = tokens, I and O = inputs and outputs of a linear layer, r = rank.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1: y = W x + (alpha / r) B A x, A drawn at random, B zero at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayzero3.config import LoraSection
from rayzero3.errors import ConfigError
from rayzero3.models.dropout import DropoutKeys

ADAPTER = re.compile(r"(.+)\.lora_([AB])\.weight")
"""Name of an adapter's matrix: the linear layer's name and which of the two."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter, (B, T, I) -> (B, T, O). Weight and bias keep their names; lora_A is (r, I), lora_B (O, r)."""

    def __init__(self, base: nn.Linear, name: str, lora: LoraSection, keys: DropoutKeys) -> None:
        device = base.weight.device
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.name, self.scale, self.dropout, self.keys = name, lora.alpha / lora.rank, lora.dropout, keys
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, device=device)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.keys.drop(x, self.dropout, self.name) if self.training else x
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(dropped)) * self.scale


def add_lora(blocks: Iterable[tuple[str, nn.Module]], lora: LoraSection, keys: DropoutKeys) -> None:
    """Put adapters into the linear layers of a model's blocks, in place.

    Args:
        blocks: The name of each block and its module.

    Raises:
        ConfigError: a target is the name of no linear layer.
    """
    found: set[str] = set()
    for prefix, block in blocks:
        for path, module in list(block.named_modules()):
            parent, _, leaf = path.rpartition(".")
            if isinstance(module, nn.Linear) and path:
                found.add(leaf)
                if lora.targets is None or leaf in lora.targets:
                    setattr(block.get_submodule(parent), leaf, LoraLinear(module, f"{prefix}.{path}", lora, keys))
    if missing := sorted(set(lora.targets or ()) - found):
        raise ConfigError("tune.lora.targets", missing, f"the blocks have linear layers called {', '.join(sorted(found))}", "Use those names.")


def initialize_adapter(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill an adapter's matrix in place: A from a uniform distribution within 1/sqrt(I), B with zeros."""
    if ADAPTER.fullmatch(name)[2] == "B":
        tensor.zero_()
    else:
        bound = tensor.shape[1] ** -0.5
        tensor.uniform_(-bound, bound, generator=generator)


def adapter_config(lora: LoraSection, targets: list[str], base: str) -> dict[str, Any]:
    """peft's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def adapter_name(name: str) -> str:
    """What peft calls the parameter."""
    return f"base_model.model.{name}"
