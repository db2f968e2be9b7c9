"""Call: one recorded call of a layer, and how autograd tells when its backward begins and ends.

Note: when a layer's backward is over. A call whose inputs need gradients ends when they are there: an identity around those inputs,
recorded first, runs last, since autograd takes nodes in the reverse order of their recording. A call without such inputs (an embedding
reads integers) ends when every trainable parameter of the layer has its gradient. The layer is done when no call is left; a graph that
is thrown away takes its call with it. What never ends this way (an unused parameter of an embedding) is flushed at the end of backward.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from rayzero3.engine.layer import Zero3Layer


class Call:
    """One call of a layer. Its graph holds it; it holds the layer weakly."""

    def __init__(self, layer: Zero3Layer) -> None:
        self.layer, self.has_grad_inputs = weakref.ref(layer), False

    def take_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The inputs in the layer's compute dtype, those that need gradients behind an identity that reports the end of this call's backward."""
        one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)  # most layers; a tree's traversal costs more than some of them
        leaves, spec = (args, None) if one else tree_flatten((args, kwargs))
        dtype = self.layer().dtype
        leaves = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad] if torch.is_grad_enabled() else []
        if watched:
            self.has_grad_inputs = True
            for i, tensor in zip(watched, _Inputs.apply(self, *(leaves[i] for i in watched)), strict=True):
                leaves[i] = tensor
        return (tuple(leaves), kwargs) if one else tree_unflatten(leaves, spec)

    def watch_outputs(self, output: Any) -> bool:
        """Report the begin of this call's backward. Returns whether autograd recorded the call."""
        leaves = [output] if isinstance(output, Tensor) else tree_flatten(output)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in tensors:
            tensor.register_hook(self._begin)
        return bool(tensors)

    def _begin(self, grad: Tensor) -> None:
        self.layer().call_begins_backward(self)

    def end(self) -> None:
        self.layer().call_ends_backward(self)


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.end()
        return (None, *grads)
