"""Peer: an engine behind one small interface. `ENGINES` names them; each builder gets a workload and returns a Peer.

All of them are set up as their documentation tells, on gloo, with fused AdamW, the same first weights and no gradient clipping.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench.workloads import Workload

LEARNING_RATE = 3e-4


def mean_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Mean cross-entropy of (B, T, V) logits over the tokens of a (B, T + 1) batch."""
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


class Peer(ABC):
    """An engine with a model in it."""

    @abstractmethod
    def step(self, batch: Tensor) -> float:
        """One step on this rank's (B, T + 1) tokens. Returns this rank's loss. No gradient is left after it."""


class _Torch(Peer):
    """A module whose backward leaves the gradients in what AdamW updates: DDP, both FSDPs."""

    def __init__(self, model: nn.Module, autocast: bool = False) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.context = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext

    def step(self, batch: Tensor) -> float:
        with self.context():
            logits = self.model(batch[:, :-1])
        loss = mean_loss(logits, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class _Limit(Peer):
    """The plain model without communication. In bf16 it computes with a copy of fp32 masters, as the sharded engines do."""

    def __init__(self, workload: Workload) -> None:
        self.model = nn.Sequential(*workload.build()).to(workload.torch_dtype)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        if workload.dtype == "fp32":
            self.masters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, batch: Tensor) -> float:
        loss = mean_loss(self.model(batch[:, :-1]), batch)
        loss.backward()
        pairs = [(master, own) for master, own in zip(self.masters, self.model.parameters(), strict=True) if master is not own]
        for master, own in pairs:
            master.grad, own.grad = own.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for master, own in pairs:
                own.copy_(master)
        return loss.item()


class _Ours(Peer):
    """Our engine; where `sends`, as between hosts: its ranks don't read each other's memory."""

    def __init__(self, workload: Workload, sends: bool = False) -> None:
        from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential
        from rayzero3.engine.comm import Comm

        if sends:
            Comm._meet = lambda self: None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        layers = workload.build()
        for index, layer in enumerate(layers):
            layers[index] = Zero3Layer(layer, rank, world_size, "cpu", workload.torch_dtype)
        self.model = Zero3Sequential(layers)
        self.optimizer = Zero3Adam(self.model.get_trainable_chunk(), lr=LEARNING_RATE)

    def step(self, batch: Tensor) -> float:
        loss = mean_loss(self.model(batch[:, :-1]), batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _ddp(workload: Workload) -> Peer:
    from torch.nn.parallel import DistributedDataParallel

    return _Torch(DistributedDataParallel(nn.Sequential(*workload.build())), autocast=workload.dtype == "bf16")


def _fsdp1(workload: Workload) -> Peer:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from rayzero3.models.gpt_neox import Block

    dtype = workload.torch_dtype
    mixed = None if workload.dtype == "fp32" else MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    model = nn.Sequential(*workload.build())
    return _Torch(
        FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=mixed, device_id=torch.device("cpu"))
    )


def _fsdp2(workload: Workload) -> Peer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy() if workload.dtype == "fp32" else MixedPrecisionPolicy(param_dtype=workload.torch_dtype)
    model = nn.Sequential(*workload.build())
    for block in list(model)[1:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return _Torch(fully_shard(model, mesh=mesh, mp_policy=policy))


class _DeepSpeed(Peer):
    def __init__(self, workload: Workload) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None  # needs a compiler and minutes, and no collective of training uses it
        config = {
            "train_micro_batch_size_per_gpu": workload.micro_batch,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": workload.dtype == "bf16"},
            "zero_optimization": {"stage": 3},
            "steps_per_print": 10**9,
        }
        model = nn.Sequential(*workload.build())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batch: Tensor) -> float:
        loss = mean_loss(self.engine(batch[:, :-1]), batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


SENDING = "ours-gloo"
ENGINES: dict[str, Callable[[Workload], Peer]] = {
    "ours": _Ours,
    SENDING: lambda workload: _Ours(workload, sends=True),
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "ddp": _ddp,
    "deepspeed": _DeepSpeed,
    "limit": _Limit,
}
SHARDED = ("ours", SENDING, "fsdp2", "fsdp1", "deepspeed")


def missing(engine: str) -> str | None:
    """Why an engine can't run here, or None."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    return None
