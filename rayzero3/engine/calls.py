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

    def watch_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same inputs, those that need gradients behind an identity that reports the end of this call's backward."""
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if watched:
            self.has_grad_inputs = True
            for i, tensor in zip(watched, _Inputs.apply(self, *(leaves[i] for i in watched)), strict=True):
                leaves[i] = tensor
        return tree_unflatten(leaves, spec)

    def watch_outputs(self, output: Any) -> bool:
        """Report the begin of this call's backward. Returns whether autograd recorded the call."""
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
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
