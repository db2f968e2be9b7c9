"""Start: what a model's parameters are filled from: a Hugging Face folder, or nothing but the seed; adapters from the seed always."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rayzero3.errors import CheckpointError
from rayzero3.models.lora import ADAPTER, initialize_adapter
from rayzero3.models.weights import SafetensorsWeights

GeneratorFor = Callable[[int, str], torch.Generator]
_NO_PARAMETERS = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")
"""What older files hold beside parameters: tables that are made anew."""
_OTHER_NAMES = {"embed_out.weight": "lm_head.weight", "lm_head.weight": "embed_out.weight"}
"""Names under which different versions of transformers write the same parameter."""


class Start:
    """Weights from a folder, with adapters from (seed, name). What the engine reads a model from.

    Args:
        weights: The folder's.
        generator_for: The generator of a (seed, name).
    """

    def __init__(self, weights: SafetensorsWeights, seed: int, generator_for: GeneratorFor) -> None:
        self._weights, self._seed, self._generator_for = weights, seed, generator_for
        self._adapter: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened parameter. Raises CheckpointError as SafetensorsWeights does."""
        if not ADAPTER.fullmatch(name):
            return self._weights.read(file_name(name, self._weights), shape, start, stop)
        if self._adapter[0] != name:
            full = torch.empty(shape)
            initialize_adapter(name, full, self._generator_for(self._seed, name))
            self._adapter = (name, full.view(-1))
        return self._adapter[1][start:stop]


def file_name(name: str, weights: SafetensorsWeights) -> str:
    """What a folder calls the parameter `name`."""
    return _OTHER_NAMES[name] if name not in weights and _OTHER_NAMES.get(name) in weights else name


def check_names(parts: Iterable[tuple[str, nn.Module]], weights: SafetensorsWeights) -> None:
    """Compare a model's parameters with a folder's, in both directions, adapters left out. Tied ones go by their first name.

    Raises:
        CheckpointError: names the parameters that only one of them has, or whose shapes differ.
    """
    mine, others, seen = {}, set(), set()
    for prefix, module in parts:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            if ADAPTER.fullmatch(full):
                continue
            if id(parameter) in seen:
                others.add(file_name(full, weights))
            else:
                seen.add(id(parameter))
                mine[file_name(full, weights)] = tuple(parameter.shape)
    theirs = {name: weights.shape(name) for name in weights.names() if not _NO_PARAMETERS.fullmatch(name)}
    faults = [f"{name} is in the model, {shape}, and not in the files" for name, shape in mine.items() if name not in theirs]
    faults += [f"{name} is in the files, {shape}, and not in the model" for name, shape in theirs.items() if name not in mine and name not in others]
    faults += [f"{name} is {theirs[name]} in the files and {shape} in the model" for name, shape in mine.items() if theirs.get(name, shape) != shape]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"the weights in {weights.path} are not the model's", None, "; ".join(faults[:5]) + more, "Give the config.json that they belong to.")
