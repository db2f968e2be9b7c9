"""Places: where a layer's parameters stand in modules, and what stands there while they have no memory.

A freed parameter is a view of a storage of 0 bytes: reading it would crash the process. So while a layer is not fetched, a ChunkedParameter
stands in its place, which knows shape and dtype and answers anything else with an error that names the layer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rayzero3.errors import StateError

_READABLE = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_meta", "is_sparse", "is_quantized", "names", "grad", "grad_fn",
    "size", "numel", "nelement", "dim", "element_size", "stride", "storage_offset", "is_floating_point", "is_complex", "__len__",
    "itemsize", "nbytes", "is_cuda", "is_cpu", "untyped_storage",
}  # fmt: skip
"""What can be asked of a parameter without its values."""


class ChunkedParameter(nn.Parameter):
    """Stands for a parameter of a layer that is not fetched. Anything that needs its values is a StateError."""

    zero3_home: tuple[weakref.ref, str]

    @classmethod
    def standing_for(cls, view: nn.Parameter) -> ChunkedParameter:
        """A stand-in with the view's home, shape, dtype and requires_grad, on the same storage."""
        stand_in = torch.Tensor._make_subclass(cls, view.data, view.requires_grad)
        stand_in.zero3_home = view.zero3_home
        return stand_in

    @property
    def label(self) -> str:
        """The parameter's full name."""
        layer, name = self.zero3_home
        return layer().full_name(name) if layer() is not None else name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__ if func.__name__ not in ("__get__", "__set__") else func.__self__.__name__
        if name in _READABLE and func.__name__ != "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        label = next((value.label for value in tree_leaves((args, kwargs)) if isinstance(value, cls)), "of a Zero3Layer")
        raise StateError(
            f"parameter {label} can't be used in {name}",
            None,
            "its layer is not fetched, so this rank holds a chunk of it only",
            "Read or write it within `with gathered(layer):`; give an optimizer `get_trainable_chunk()`.",
        )

    def __repr__(self) -> str:
        return f"ChunkedParameter({self.label}, shape={tuple(self.shape)}, dtype={self.dtype})"


class Places:
    """The attributes of modules that hold some parameters."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter, ChunkedParameter]] = []
        self._stand_ins: dict[int, ChunkedParameter] = {}

    def add(self, module: nn.Module, views: dict[int, nn.Parameter]) -> None:
        """Put views, or what stands for them, where `module` holds the parameters of these identities.

        Args:
            views: id of the parameter that is there now -> its view, marked with its home.
        """
        for owner in module.modules():
            for attribute, parameter in owner._parameters.items():
                if id(parameter) in views:
                    view = views[id(parameter)]
                    stand_in = self._stand_ins.setdefault(id(view), ChunkedParameter.standing_for(view))
                    self._places.append((owner, attribute, view, stand_in))
        self.show(False)

    def show(self, readable: bool) -> None:
        """Let the modules see the parameters, or what stands for them."""
        for owner, attribute, view, stand_in in self._places:
            owner._parameters[attribute] = view if readable else stand_in


def replace(module: nn.Module, by_identity: dict[int, Tensor]) -> None:
    """Put other parameters where `module` holds those of these identities."""
    for owner in module.modules():
        for attribute, parameter in owner._parameters.items():
            if id(parameter) in by_identity:
                owner._parameters[attribute] = by_identity[id(parameter)]
