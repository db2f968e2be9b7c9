"""Zero3Layer: a module whose parameters are held in chunks and fetched when it computes.

Letters: N = world size, C = elements of one chunk.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rayzero3.engine.build import Initializer, Weights, check_buffers, fill_chunk, flat_parameters
from rayzero3.engine.calls import Call
from rayzero3.engine.comm import Comm
from rayzero3.engine.flat import FlatParameter
from rayzero3.engine.mesh import Group
from rayzero3.engine.order import FetchOrder
from rayzero3.engine.pending import Pending
from rayzero3.engine.places import Places
from rayzero3.engine.state import LayerState, check_transition
from rayzero3.engine.tied import hold_tied
from rayzero3.errors import StateError


class Zero3Layer(nn.Module):
    """Shard a module's parameters over the ranks; gather them around its forward and backward, reduce-scatter their gradients.

    A module with real values takes rank 0's, scattered. A module on the meta device is initialised one parameter at a time from
    (seed, name), each rank keeping its slice. Floating inputs are cast to the compute dtype; buffers keep theirs. A parameter that
    another Zero3Layer already holds is tied: it moves into a layer of its own that both hold.

    Args:
        module: The module; its parameters are replaced by views. To compile, pass `torch.compile(module)` or call `module.compile()` first.
        rank, world_size: Of this process; must be those of the process group.
        device: Where it computes and where the chunks lie.
        dtype: Compute dtype: fp32, bf16 or fp16. Trainable chunks are fp32 whatever it is; frozen ones keep the parameter's dtype.
        group: Process group; None for the default one; a mesh of (replicas, shards) for hybrid sharding.
        name: First part of the parameters' names; Zero3Sequential gives the position if it is None.
        initialize: Fills one parameter, or Weights to read from; needed for modules on the meta device, and so is a name.
        seed: For `initialize`.
        offload: Keep the chunks in host memory, where Zero3Adam updates them.
        frozen_blocks: Keep frozen matrices in 8-bit blocks, see BlockFlat.
        recompute: Keep only the inputs for backward and run the module again there (activation checkpointing).

    Attributes:
        module: The module; its parameters are readable while the layer is FETCHED.
        state: LayerState.
        trainable: The trainable FlatParameter, or None.
        frozen: The frozen ones, one per dtype.
        held: The layers of tied weights that this layer uses.
        places: Where the parameters stand in modules.

    Cost: between steps 4*C bytes (and 8*C in Adam); while FETCHED N*C elements of the compute dtype in addition.

    Raises:
        StateError: rank or world_size are not the group's; a parameter or buffer without values.

    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3; the seed article's Zero3Layer.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        world_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        group: Group = None,
        name: str | None = None,
        initialize: Initializer | Weights | None = None,
        seed: int = 0,
        recompute: bool = False,
        offload: bool = False,
        frozen_blocks: bool = False,
    ) -> None:
        super().__init__()
        comm = Comm(group, device)
        if (rank, world_size) != (comm.total_rank, comm.total_size):
            raise StateError(
                "(rank, world_size)", (rank, world_size), f"this process is {(comm.total_rank, comm.total_size)} in its process group", "Pass those."
            )
        self.module, self.name, self.device, self.dtype = module, name, torch.device(device), dtype
        self.recompute, self.offload, self.frozen_blocks = recompute, offload, frozen_blocks
        self.state = LayerState.CHUNKED
        self.trainable: FlatParameter | None = None
        self.frozen: list[FlatParameter] = []
        self.held: list[Zero3Layer] = []
        self.places = Places()
        self._pending: list[Pending] = []
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._fired: set[str] = set()
        self._warned = False
        self.join(FetchOrder([self], comm, keep_last=False))
        check_buffers(module, self.label, self.device)
        hold_tied(self)
        self.shard(initialize if name is not None else None, seed)

    @property
    def label(self) -> str:
        """How errors and the ledger call this layer."""
        return self.name or type(self.module).__name__

    def full_name(self, name: str) -> str:
        """The name in the model of this layer's parameter `name`; seeds, checkpoints and errors go by it."""
        prefix = self.label if self.name is None else self.name
        return f"{prefix}.{name}" if prefix else name

    @property
    def flats(self) -> list[FlatParameter]:
        """The layer's own flat parameters, the trainable one first."""
        return ([self.trainable] if self.trainable is not None else []) + self.frozen

    @property
    def full_bytes(self) -> int:
        """Bytes of the layer's own parameters while they are fetched, padding included."""
        return sum(flat.padded_bytes for flat in self.flats)

    @property
    def comm(self) -> Comm:
        """The communicator that this layer shares with the others of its order."""
        return self._order.comm

    @property
    def awaits_backward(self) -> bool:
        """Whether a recorded call of this layer has not had its backward."""
        return len(self._calls) > 0

    def join(self, order: FetchOrder) -> None:
        """Join a schedule, and with it its communicator."""
        self._order = order
        for flat in self.flats:
            flat.join(order.comm)

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """The trainable chunks that this layer uses, each (C,) fp32: those of tied weights, then its own."""
        return [layer.trainable.chunk for layer in (*self.held, self) if layer.trainable is not None]

    def fetch_params(self) -> None:
        """All-gather this layer's chunks so that its module can compute.

        State: CHUNKED -> FETCHED. No-op if FETCHED; waits if a prefetch is in flight. Every rank calls it in the same order.

        Shapes:
            chunk: (C,), this rank's slice; read, not changed.
            full: (N*C,) compute dtype; allocated here, freed by `cleanup_params`.

        Cost: + N*C*itemsize bytes of memory; (N-1)*C*itemsize bytes received per rank.

        Raises:
            StateError: called while gradients are being reduced.
            CollectiveError: a rank is gone, or is at another collective.
        """
        self.start_fetch()
        if self.state is LayerState.FETCHING:
            for pending, flat in zip(self._pending, self.flats, strict=True):
                pending.wait()
                flat.fetched()
            self._pending = []
            self._move(LayerState.FETCHED)

    def start_fetch(self) -> None:
        """Launch the gather and return. State: CHUNKED -> FETCHING; no-op if FETCHING or FETCHED."""
        if self.state not in (LayerState.FETCHING, LayerState.FETCHED):
            for flat in self.flats:
                flat.wait_updated()
            self._move(LayerState.FETCHING)
            self._pending = [self.comm.all_gather(flat.allocate(), self.label, flat.put_chunk) for flat in self.flats]

    def cleanup_params(self) -> None:
        """Free the full parameters, keep the chunks. State: FETCHED -> CHUNKED; no-op if CHUNKED."""
        if self.state is LayerState.FETCHED:
            for flat in self.flats:
                flat.free()
            self._move(LayerState.CHUNKED)

    def release(self) -> None:
        """Bring the layer to CHUNKED from whatever fetch it is in, waiting for a gather in flight."""
        if self.state in (LayerState.FETCHING, LayerState.FETCHED):
            self.fetch_params()
            self.cleanup_params()

    def start_reduce(self) -> None:
        """Launch the reduce-scatter of the flat gradient. State: CHUNKED, or FETCHED where the layer is kept so, -> REDUCING.

        A parameter without a gradient counts as zeros and is named in a warning, once.
        """
        self._move(LayerState.REDUCING)
        grad, missing = self.trainable.take_grad()
        if missing and not self._warned:
            self._warned = True
            names = ", ".join(self.full_name(name) for name in missing)
            warnings.warn(f"{names}: no gradient in this backward; zeros are reduced in its place.", stacklevel=2)
        self._pending = [self.comm.reduce_scatter(grad, self.label)]

    def finish_reduce(self) -> None:
        """Add the reduced gradient to the chunk's gradient. State: REDUCING -> CHUNKED, or FETCHED where it came from there."""
        self.trainable.accumulate(self._pending.pop().wait(), self.comm.total_size if self._order.average else 1)
        self._move(LayerState.FETCHED if self.trainable.allocated_bytes else LayerState.CHUNKED)

    def backward_over(self) -> None:
        """Autograd has ended: the next gradient of a parameter belongs to another backward."""
        self._fired.clear()

    def drop(self) -> None:
        """After an exception: forget the calls, every collective in flight, and gradients that were not reduced."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        for flat in self.flats:
            flat.free()
            flat.drop_grad()
        self._fired.clear()
        self._calls.clear()
        self.state = LayerState.CHUNKED
        self.places.show(False)

    def __getattr__(self, name: str) -> Any:
        """What the layer lacks, its module may have: code that holds the layer in the module's place reads the module's attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with full parameters."""
        call = Call(self)
        self._order.before_forward(self)
        try:
            args, kwargs = call.take_inputs(args, kwargs)
            if self.recompute and torch.is_grad_enabled():
                output = checkpoint(self.module, *args, use_reentrant=False, **kwargs)
            else:
                output = self.module(*args, **kwargs)
            recorded = call.watch_outputs(output)
        except BaseException:
            self._order.forward_failed()
            raise
        if recorded:
            self._calls.add(call)
        self._order.after_forward(self, recorded)
        return output

    def call_begins_backward(self, call: Call) -> None:
        """Autograd reached an output of `call`: fetch before its nodes run."""
        self._calls.add(call)
        self._order.before_backward(self)

    def call_ends_backward(self, call: Call) -> None:
        """The gradients of the inputs of `call` are there."""
        self._calls.discard(call)
        self._finish_if_done()

    def _grad_ready(self, name: str) -> None:
        self.trainable.write_grad(name, torch.float32 if self._order.hold_gradients else self.dtype)
        self._fired.add(name)
        if len(self._fired) == len(self.trainable.parameters):
            for call in [call for call in self._calls if not call.has_grad_inputs]:
                self._calls.discard(call)
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if not self._calls:
            self._order.backward_done(self)

    def _move(self, state: LayerState) -> None:
        self.state = check_transition(self.label, self.state, state)
        if state in (LayerState.FETCHED, LayerState.CHUNKED):
            self.places.show(state is LayerState.FETCHED)

    def lend(self, module: nn.Module, names: dict[int, str]) -> None:
        """Have `module` use this layer's parameters.

        Args:
            names: id of the parameter that is in `module` now -> name of this layer's parameter.
        """
        views = {name: view for flat in self.flats for name, view in flat.parameters.items()}
        self.places.add(module, {identity: views[name] for identity, name in names.items()})

    def shard(self, initialize: Initializer | Weights | None = None, seed: int = 0) -> None:
        """Replace the module's own parameters by views of flat parameters, and fill the chunks; those that other layers hold stay theirs."""
        self.trainable, self.frozen, self.places, views = None, [], Places(), {}
        for flat, values in flat_parameters(self.module, self.comm, self.device, self.dtype, self.offload, self.frozen_blocks):
            fill_chunk(flat, {name: value.detach() for name, value in values.items()}, self.label, self.full_name, initialize, seed)
            for name, value in values.items():
                view = views[id(value)] = flat.parameters[name]
                value.zero3_home = view.zero3_home = (weakref.ref(self), name)
            if flat.trainable:
                self.trainable = flat
                self._hook_gradients()
            else:
                self.frozen.append(flat)
        self.places.add(self.module, views)

    def _hook_gradients(self) -> None:
        me = weakref.ref(self)
        for name, parameter in self.trainable.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: me()._grad_ready(name))
