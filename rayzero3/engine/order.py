"""FetchOrder: which layer is fetched, freed and reduced when.

Layers are fetched in the order of the forward, one ahead (`prefetch`), and in the reverse order in backward, one behind. They reduce in
the reverse of the fetch order, whatever order their gradients become ready in, so that the collectives meet on all ranks. The fetch of
layer i-1 is launched before the reduce of layer i, since collectives of one communicator run in launch order.

Memory: 1 + prefetch layers of full parameters, beside the last layer (kept from its forward to its backward) and tied weights (kept
from their first use to their last); at most two flat gradients, one that fills up and one in flight.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rayzero3.engine.comm import Comm

if TYPE_CHECKING:
    from rayzero3.engine.layer import Zero3Layer


class FetchOrder:
    """The schedule of some layers. Layers hold it; it holds them weakly.

    Args:
        layers: In the order in which the forward calls them.
        comm: The communicator of all of them.
        prefetch: How many layers are fetched ahead of the one that computes.
        keep_last: Whether the last layer stays fetched from its forward to its backward, which would fetch it first.
        average: Whether reduced gradients are divided by the world size.
        rooted: Whether somebody says where a forward begins and ends. Otherwise it begins with the first layer, and layers are called in
            the order given; else that order is learnt in the first forward.
        pinned: Layers that are fetched from the begin of a forward to the end of its backward.

    Attributes:
        hold_gradients: While True, backwards keep their full gradients, in fp32; the first one after reduces them all.
    """

    def __init__(
        self,
        layers: list[Zero3Layer],
        comm: Comm,
        prefetch: int = 1,
        keep_last: bool = True,
        average: bool = True,
        rooted: bool = False,
        pinned: Sequence[Zero3Layer] = (),
    ) -> None:
        self._pinned = [weakref.ref(layer) for layer in pinned]
        self.comm, self.prefetch, self.keep_last, self.average, self.rooted = comm, prefetch, keep_last, average, rooted
        self._set_order(layers)
        self._called: list[Zero3Layer] = []
        self._learnt = False
        self.hold_gradients = False
        self._kept: dict[int, Zero3Layer] = {}
        self._begin()

    def layers(self) -> list[Zero3Layer]:
        """All layers in fetch order: pinned ones first, a tied weight's layer before its first user."""
        found: dict[int, Zero3Layer] = {id(layer()): layer() for layer in self._pinned}
        for caller in self._callers:
            layer = caller()
            for member in (*layer.held, layer):
                found.setdefault(id(member), member)
        return list(found.values())

    def begin_forward(self) -> None:
        """A new forward: nothing stale stays fetched."""
        if self._in_backward and not _autograd_runs():
            self.reset()
        if not self._in_backward:
            self._called = []
            for layer in self.layers():
                self._release(layer)
            self._fetch_pinned()

    def end_forward(self) -> None:
        """The forward is over: learn the order in which it called the layers; those that it did not call come last.

        Every rank learns the same, or the next collective fails with the places of all. A change is told.
        """
        if self._in_backward:
            return
        order = list(dict.fromkeys([*self._called, *(caller() for caller in self._callers)]))
        if order != [caller() for caller in self._callers]:
            if self._learnt:
                names = ", ".join(layer.label for layer in self._called)
                warnings.warn(f"the forward calls its layers in another order than before; prefetching follows it: {names}", stacklevel=2)
            self._set_order(order)
        self._learnt = True
        if not torch.is_grad_enabled():
            for layer in self._pinned:
                layer().release()

    def before_forward(self, layer: Zero3Layer) -> None:
        """Fetch `layer` and launch the fetch of what follows."""
        if not self.rooted and self._position[id(layer)] == 0:
            self.begin_forward()
        if self._in_backward and not _autograd_runs():
            self.reset()
        self._called.append(layer)
        self._fetch(layer, +1)

    def after_forward(self, layer: Zero3Layer, recorded: bool) -> None:
        """Free `layer`, unless a recomputation inside backward or its own backward needs it at once.

        Args:
            recorded: Whether autograd recorded the call, so that a backward may come.
        """
        if self._in_backward:
            return
        position = self._position[id(layer)]
        if not (recorded and self.keep_last and position == len(self._callers) - 1):
            self._cleanup(layer)
        if not recorded:
            for tied in layer.held:
                if not any(tied in caller().held for caller in self._callers[position + 1 :]):
                    tied.cleanup_params()

    def before_backward(self, layer: Zero3Layer) -> None:
        """Fetch `layer` for its backward and launch the fetch of the one before it."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self._fetch_pinned()
        self._fetch(layer, -1)

    def backward_done(self, layer: Zero3Layer) -> None:
        """`layer` has its gradients: free its parameters and reduce all layers whose turn it is."""
        self._cleanup(layer)
        self._ready.add(id(layer))
        if not self.hold_gradients:
            self._reduce_ready()

    def forward_failed(self) -> None:
        """A layer's module raised. A recomputation inside backward may do so by design, so there nothing is dropped."""
        if not self._in_backward:
            self.reset()

    def reset(self) -> None:
        """Drop everything in flight, after an exception: the next forward starts from chunks alone."""
        for layer in self.layers():
            layer.drop()
        self._begin()

    def keep(self, budget_bytes: int) -> None:
        """From now on layers stay fetched once they are, as many as fit, those first whose fetches cost most. 0 frees them all."""
        for layer in self._kept.values():
            layer.release()
        self._kept = {}
        last = self._callers[-1]() if self.keep_last else None
        traffic = {caller(): (1 if caller() is last else 2) * caller().full_bytes for caller in self._callers}
        for layer in sorted(traffic, key=traffic.get, reverse=True):
            if 0 < layer.full_bytes <= budget_bytes:
                budget_bytes -= layer.full_bytes
                self._kept[id(layer)] = layer

    def whole_bytes(self) -> tuple[int, list[int], int]:
        """As in Zero3Model."""
        callers = [caller() for caller in self._callers]
        constant = sum(layer.full_bytes for layer in self.layers() if layer not in callers)
        return constant, [layer.full_bytes for layer in callers], callers[-1].full_bytes if self.keep_last else 0

    def _cleanup(self, layer: Zero3Layer) -> None:
        if id(layer) not in self._kept:
            layer.cleanup_params()

    def _release(self, layer: Zero3Layer) -> None:
        if id(layer) not in self._kept:
            layer.release()

    def _set_order(self, layers: list[Zero3Layer]) -> None:
        self._callers = [weakref.ref(layer) for layer in layers]
        self._position = {id(layer): index for index, layer in enumerate(layers)}

    def _begin(self) -> None:
        self._in_backward = False
        self._ready: set[int] = set()
        self._unreduced: list[Zero3Layer] | None = None
        self._in_flight: Zero3Layer | None = None

    def _fetch_pinned(self) -> None:
        for layer in self._pinned:
            layer().fetch_params()

    def _fetch(self, layer: Zero3Layer, direction: int) -> None:
        for member in (*layer.held, layer):
            member.fetch_params()
        position = self._position[id(layer)]
        for distance in range(1, self.prefetch + 1):
            neighbour = position + direction * distance
            if 0 <= neighbour < len(self._callers):
                other = self._callers[neighbour]()
                if direction > 0 or other.awaits_backward:
                    for member in (*other.held, other):
                        member.start_fetch()

    def _reduce_ready(self) -> None:
        if self._unreduced is None:
            self._unreduced = [layer for layer in self.layers() if layer.trainable is not None]
        while self._unreduced and id(self._unreduced[-1]) in self._ready:
            layer = self._unreduced.pop()
            if self._in_flight is not None:
                self._in_flight.finish_reduce()
            layer.start_reduce()
            self._in_flight = layer

    def _end_of_backward(self) -> None:
        """Flush what no hook has reduced, with zeros where a gradient is missing; leave every layer CHUNKED."""
        for layer in reversed(self.layers()):
            self._release(layer)
            if id(layer) not in self._ready:
                self.backward_done(layer)
            layer.backward_over()
        if self._in_flight is not None:
            self._in_flight.finish_reduce()
        self._begin()


def _autograd_runs() -> bool:
    return torch._C._current_graph_task_id() >= 0
