"""Tune: which parameters of a model train, and how the frozen ones are kept."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from rayzero3.config import TuneSection
from rayzero3.errors import ConfigError
from rayzero3.models.lora import ADAPTER

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_trainable(name: str, tune: TuneSection) -> bool:
    """Whether the parameter of that full name trains."""
    if tune.lora is not None:
        return ADAPTER.fullmatch(name) is not None
    if tune.parameters == "biases":
        return name.rpartition(".")[2] == "bias"
    return tune.parameters == "all" or re.fullmatch(tune.parameters, name) is not None


def freeze(parts: Iterable[tuple[str, nn.Module]], tune: TuneSection, compute_dtype: str) -> None:
    """Freeze what does not train, in place, and give it the dtype in which it is kept. For modules on the meta device.

    Args:
        parts: Modules, each with the first part of its parameters' names.

    Raises:
        ConfigError: nothing would train.
    """
    dtype = _DTYPES.get(tune.frozen_dtype or compute_dtype, _DTYPES[compute_dtype])
    names, seen, trains = [], set(), False
    for prefix, module in parts:
        for name, parameter in module.named_parameters():
            if id(parameter) in seen:
                continue  # tied: it goes by its first name
            seen.add(id(parameter))
            names.append(f"{prefix}.{name}" if prefix else name)
            parameter.requires_grad_(is_trainable(names[-1], tune))
            trains |= parameter.requires_grad
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    if not trains:
        some = f"no parameter has such a name; there are {', '.join(names[:4])} and {max(0, len(names) - 4)} more"
        raise ConfigError("tune.parameters", repr(tune.parameters), some, "Change it, or train adapters with tune.lora.")
