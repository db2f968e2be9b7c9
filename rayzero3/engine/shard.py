"""shard_model: ZeRO-3 for an ordinary module, such as a model from transformers, without a change to its code."""

from __future__ import annotations

import fnmatch
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from rayzero3.engine.build import Initializer, Weights, plain_name
from rayzero3.engine.comm import Comm
from rayzero3.engine.layer import Zero3Layer
from rayzero3.engine.mesh import Group
from rayzero3.engine.sequential import Zero3Model
from rayzero3.engine.tied import TiedWeight
from rayzero3.errors import StateError


class ShardedModel(Zero3Model):
    """An ordinary module whose parts are Zero3Layers. Calls, and attributes that it lacks, go to the module.

    Attributes:
        module: The module.
        pinned: The layers of pinned parameters.
    """

    def __init__(self, module: nn.Module, layers: list[Zero3Layer], pinned: list[Zero3Layer], prefetch: int, average: bool) -> None:
        super().__init__(layers, prefetch, average, rooted=True, pinned=pinned)
        self.module, self.pinned = module, nn.ModuleList(pinned)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. The first one shows in which order the layers are called."""
        self._order.begin_forward()
        output = self.module(*args, **kwargs)
        self._order.end_forward()
        return output


def shard_model(
    model: nn.Module,
    layers: list[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    pin: tuple[str, ...] = (),
    group: Group = None,
    initialize: Initializer | Weights | None = None,
    seed: int = 0,
    offload: bool = False,
    frozen_blocks: bool = False,
    recompute: Container[str] = (),
    prefetch: int = 1,
    average: bool = True,
) -> ShardedModel:
    """Put Zero3Layers around parts of a module.

    The blocks that `layers` names become one layer each. Every other module that has parameters and no children (an embedding, a norm, a
    head) becomes a layer of its own. Parameters of modules that have children, and those that `pin` names since a parent reads them
    without calling their module, are pinned: whole from the first use in a forward to the last in backward.

    Args:
        model: The module; it is changed in place. Weights may be tied, modules may stand in several places.
        layers: Globs for the names of the blocks, such as `model.layers.*`.
        device, dtype, group, initialize, seed, offload, frozen_blocks: As in Zero3Layer. Names are those of `model`.
        recompute: Names of the blocks that run again in backward, see Zero3Layer.
        pin: Globs for the names of parameters that are pinned.
        prefetch, average: As in Zero3Model.

    Raises:
        StateError: a glob matches nothing, or a block lies within another.
    """
    comm = Comm(group)
    rank, world_size = comm.total_rank, comm.total_size
    shared = {"device": device, "dtype": dtype, "group": group, "initialize": initialize, "seed": seed, "offload": offload, "frozen_blocks": frozen_blocks}
    blocks = _blocks(model, layers)
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    pinned = _pin(model, pin, inside, rank, world_size, shared)
    made: dict[int, Zero3Layer] = {}
    for name, module in list(model.named_modules()):
        whole = name in blocks
        core = module._modules.get("_orig_mod", module)  # what torch.compile wraps
        leaf = id(module) not in inside and any(True for _ in core.parameters(recurse=False)) and not any(True for _ in core.children())
        if (whole or leaf) and id(module) not in made:
            inside.add(id(core))
            made[id(module)] = Zero3Layer(module, rank, world_size, name=plain_name(name), recompute=plain_name(name) in recompute, **shared)
    for parent in [part for part in model.modules() if not isinstance(part, Zero3Layer)]:
        for attribute, child in parent._modules.items():
            if id(child) in made and parent is not made[id(child)]:
                parent._modules[attribute] = made[id(child)]
    ordered = list(made.values())
    if not ordered:
        raise StateError("the model has no part with parameters to shard", None, None, "Name its blocks in layers=.")
    return ShardedModel(made.get(id(model), model), ordered, pinned, prefetch, average)


def _blocks(model: nn.Module, globs: list[str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    names = dict(model.named_modules())
    for glob in globs:
        depth = glob.count(".")
        matches = {name: module for name, module in names.items() if name.count(".") == depth and fnmatch.fnmatchcase(name, glob)}
        if not matches:
            raise StateError(f"layers={glob!r} matches no module", None, f"the model has {', '.join(list(names)[1:8])}, ...", "Name its blocks.")
        found |= matches
    for outer in found:
        for inner in found:
            if inner.startswith(f"{outer}."):
                raise StateError(f"layer {inner} lies within layer {outer}", None, "a layer is fetched and freed as a whole", "Name one of them.")
    return found


def _pin(model: nn.Module, globs: tuple[str, ...], inside: set[int], rank: int, world_size: int, shared: dict[str, Any]) -> list[Zero3Layer]:
    """Layers of one parameter each, for what no module call would fetch."""
    pinned = []
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        homeless = id(owner) not in inside and any(True for _ in owner.children())
        if homeless or any(fnmatch.fnmatchcase(name, glob) for glob in globs):
            layer = Zero3Layer(TiedWeight(leaf, parameter), rank, world_size, name=plain_name(path), **shared)
            layer.lend(model, {id(parameter): leaf})
            pinned.append(layer)
    return pinned
