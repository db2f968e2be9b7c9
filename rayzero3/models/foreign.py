"""Any causal model of the transformers library: built without memory for its parameters, and its blocks found.

transformers is an extra of the package; it is imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor, nn

from rayzero3.errors import ConfigError
from rayzero3.models.context import Cache, Context
from rayzero3.models.loss import logits_loss


def causal_model(folder: Path) -> nn.Module:
    """The model that a folder's config.json describes, parameters on the meta device, buffers with their values.

    Raises:
        ConfigError: transformers is not installed, or can't build a causal model of this folder; its code is never run from there.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError("model.transformers", None, "the transformers library is not installed", "Run `pip install rayzero3[transformers]`.") from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with _parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the model in {folder}", None, f"transformers says: {str(error).splitlines()[0]}", "Give a folder with a causal model.") from None


def block_names(model: nn.Module) -> list[str]:
    """Names of the modules that repeat: those that transformers says are not to be split, or else the members of the longest list of modules."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    if not found:
        lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        name, longest = max(lists, key=lambda item: len(item[1]), default=("", ()))
        found = [f"{name}.{index}" for index in range(len(longest))]
    return [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]


def dropouts(model: nn.Module) -> list[str]:
    """Dropout that the model has, as its config says it: torch draws it, so that it is another one with another number of ranks."""
    values = model.config.to_dict()
    return [f"{key} {value}" for key, value in sorted(values.items()) if "drop" in key and isinstance(value, (int, float)) and value > 0]


def call(model: nn.Module, ids: Tensor, context: Context) -> Tensor:
    """Logits (B, T, V), or the loss, () fp32, where the context has labels."""
    if context.cache is not None:
        return _call_with_cache(model, ids, context.cache)
    logits = model(input_ids=ids, use_cache=False).logits
    return logits if context.labels is None else logits_loss(logits.flatten(0, 1), context.labels.flatten(), context.loss)


def _call_with_cache(model: nn.Module, ids: Tensor, cache: Cache) -> Tensor:
    """Logits (B, 1, V) of the last column."""
    length = ids.shape[1]
    seen = torch.arange(cache.filled + length, device=ids.device) >= cache.pads[:, None]
    places = {"position_ids": cache.positions(length)} if "position_ids" in signature(model.module.forward).parameters else {}
    output = model(input_ids=ids, attention_mask=seen.long(), past_key_values=cache.foreign, use_cache=True, **places)
    cache.foreign = output.past_key_values
    return output.logits[:, -1:]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are made inside keep no memory. Buffers do, since what fills them runs only once, when they are made."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
