"""Mesh: which ranks share a copy of the model under hybrid sharding."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
"""Where chunks are spread: a process group, the default one, or a mesh of (replicas, shards) whose rows share a copy each."""


def hybrid_mesh(shard_size: int, device: torch.device, timeout: timedelta) -> DeviceMesh | None:
    """A mesh over all ranks for hybrid sharding: each `shard_size` neighbours, such as those of a node, share a copy of the model.

    Args:
        timeout: Of its collectives.

    Returns:
        The mesh, (replicas, shards), or None where full sharding is right: `shard_size` does not divide the ranks or is all of them.
    """
    total = dist.get_world_size()
    if total % shard_size or total == shard_size:
        return None
    ranks = torch.arange(total).view(-1, shard_size)
    shards, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    replicas, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicas, shards], device.type, mesh=ranks, mesh_dim_names=("replicas", "shards"))
