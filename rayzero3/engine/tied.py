"""Tied weights: a parameter that several layers use moves into a layer of its own, which they hold.

A parameter is marked with its layer when that is made. The layer that meets the mark later takes the parameter from there: it is stored,
fetched and reduced once, whole from its first use to its last.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from rayzero3.engine.places import ChunkedParameter, replace
from rayzero3.errors import StateError

if TYPE_CHECKING:
    from rayzero3.engine.layer import Zero3Layer


class TiedWeight(nn.Module):
    """A module that is one parameter under its old name, dots and all."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__()
        *parents, leaf = name.split(".")
        owner: nn.Module = self
        for parent in parents:
            owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.register_parameter(leaf, parameter)


def hold_tied(layer: Zero3Layer) -> None:
    """Find the parameters of a layer's module that another layer has, and use them from there.

    Raises:
        StateError: a parameter's values went with a layer that is gone.
    """
    for parameter in list(layer.module.parameters()):
        home, name = getattr(parameter, "zero3_home", (None, None))
        owner = home() if home else None
        if owner is None and isinstance(parameter, ChunkedParameter):
            raise StateError(f"{layer.full_name(name)} has no values", None, "it belonged to a Zero3Layer that is gone", "Wrap a fresh module.")
        if owner is not None:
            tied = _split_off(owner, name)
            parameter.zero3_home = (weakref.ref(tied), name)
            _hold(layer, tied, {id(parameter): name})


def _split_off(layer: Zero3Layer, name: str) -> Zero3Layer:
    """Move one parameter of a layer into a layer of its own, which it then holds."""
    if isinstance(layer.module, TiedWeight):
        return layer
    layer.places.show(True)
    values = {id(flat.parameters[slot]): value for flat in layer.flats for slot, value in flat.gather_values(layer.label).items()}
    parameters = {id(view): nn.Parameter(values[id(view)], view.requires_grad) for view in layer.module.parameters() if id(view) in values}
    moved = parameters[id(layer.module.get_parameter(name))]
    replace(layer.module, parameters)
    comm = layer.comm
    tied = type(layer)(TiedWeight(name, moved), comm.total_rank, comm.total_size, layer.device, layer.dtype, group=comm.given, name=layer.name, offload=layer.offload)
    _hold(layer, tied, {id(moved): name})
    layer.shard()
    return tied


def _hold(layer: Zero3Layer, tied: Zero3Layer, names: dict[int, str]) -> None:
    layer.held.append(tied)
    tied.lend(layer.module, names)
