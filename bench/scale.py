"""`python -m bench.scale`: as one rank of up to 1,024 that do not exist: what the engine holds, and what a layer costs the host.

The group is torch's fake one, whose collectives move nothing; for the times they are left out altogether, since the fake ones take longer the
larger N is. So the time over a plain module's is the engine's own work for a layer, the launches of two fetches and a reduction included. The
memory is that of a real rank. Times are medians of interleaved steps.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.workloads import WORKLOADS, Workload
from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential, comm
from rayzero3.models.build import initialize

SIZES = (8, 64, 1024)
STEPS = 7


def sharded(workload: Workload, world_size: int) -> Zero3Sequential:
    """A workload's model as the last rank of a fake group."""
    rank = world_size - 1
    modules = enumerate(workload.build_meta())
    return Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", name=str(i), initialize=initialize) for i, module in modules])


def held_bytes(workload: Workload, world_size: int) -> tuple[int, int]:
    """Bytes of chunks, moments and average between steps, and with the gradients in a step, after one."""
    model = sharded(workload, world_size)
    optimizer = Zero3Adam(model.get_trainable_chunk())
    model(workload.batch(0, 0)[:, :-1]).sum().backward()
    optimizer.step()
    between = sum(tensor.nbytes for chunk in optimizer.chunks for tensor in (chunk, *optimizer.tensors(chunk).values()))
    return between, between + sum(chunk.grad.nbytes for chunk in optimizer.chunks)


def overhead_s(workload: Workload, world_size: int) -> float:
    """Seconds of the host per layer and step over a plain module's forward and backward. No collective is called from then on."""
    comm._all_gather = comm._reduce_scatter = lambda *_, **__: None
    networks = {"ours": sharded(workload, world_size), "plain": nn.Sequential(*workload.build())}
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for step in range(STEPS):
        tokens = workload.batch(step, 0)[:, :-1]
        for name, network in networks.items():
            start = time.perf_counter()
            network(tokens).sum().backward()
            seconds[name].append(time.perf_counter() - start)
            for parameter in (*networks["plain"].parameters(), *networks["ours"].get_trainable_chunk()):
                parameter.grad = None
    return (median(seconds["ours"]) - median(seconds["plain"])) / workload.modules


def main() -> int:
    """Print the table. Returns the exit code."""
    torch.set_num_threads(1)
    large, thin = WORKLOADS["fp32"], WORKLOADS["thin"]
    print(f"one rank of N: bytes for {large.parameters / 1e6:.1f}M parameters P, microseconds of the host for each of {thin.modules} thin layers")
    print(f"{'N':>6}{'between steps / (12 P/N)':>26}{'in a step / (16 P/N)':>22}{'us/layer':>10}")
    rows = []
    for measure in (lambda n: held_bytes(large, n), lambda n: overhead_s(thin, n)):
        for world_size in SIZES:
            dist.init_process_group("fake", rank=world_size - 1, world_size=world_size, store=FakeStore())
            rows.append(measure(world_size))
            dist.destroy_process_group()
    for world_size, (between, within), seconds in zip(SIZES, rows, rows[len(SIZES) :], strict=False):
        share = large.parameters / world_size
        print(f"{world_size:>6}{between / (12 * share):>26.4f}{within / (16 * share):>22.4f}{1e6 * seconds:>10.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
