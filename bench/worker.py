"""One rank of one engine, in a process of its own: `serve` takes commands from a pipe and answers.

Commands: {"do": "steps", "count": k} and {"do": "memory", "count": k}. It ends with the other end of the pipe.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from bench.memory import map_large_blocks, reset_peak, status_bytes
from bench.peers import ENGINES, Peer
from bench.workloads import WORKLOADS, Workload

TIMEOUT_S = 100


class Worker:
    """A rank with its model.

    Args:
        engine, workload: Names in ENGINES and WORKLOADS.
        store: A file that the ranks of this group alone share.
    """

    def __init__(self, engine: str, workload: str, rank: int, world_size: int, store: str) -> None:
        self.rank, self.done = rank, 0
        self.workload: Workload = WORKLOADS[workload]
        if engine != "limit":
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
            )
        ENGINES["limit"](WORKLOADS["tiny"]).step(WORKLOADS["tiny"].batch(0, rank))  # loads the code that any step loads
        gc.collect()
        self.start_bytes = status_bytes("VmRSS")
        self.peer: Peer = ENGINES[engine](self.workload)

    def steps(self, count: int) -> dict[str, float | list[float]]:
        """Run `count` steps. Wall and CPU seconds of this process, minor page faults, and the losses."""
        losses, faults = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            losses.append(self.peer.step(self.workload.batch(self.done, self.rank)))
            self.done += 1
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall_s": wall, "cpu_s": cpu, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, "losses": losses}

    def memory(self, count: int) -> dict[str, int]:
        """Bytes over the start: what lies there between steps, and the peak of `count - 1` steps after a first one."""
        self.steps(1)
        gc.collect()
        persistent = _storage_bytes()
        reset_peak()
        self.steps(count - 1)
        return {"persistent_bytes": persistent, "peak_bytes": status_bytes("VmHWM") - self.start_bytes}


def _storage_bytes() -> int:
    """Census: bytes of all storages that tensors in this process use, each counted once."""
    sizes = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and type(thing).__name__ != "DTensor" and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in sizes.items() if pointer)


def serve(pipe: Connection, log: str, environment: dict[str, str], mapped: bool, *about: str | int) -> None:
    """Serve until the pipe ends.

    Args:
        log: File that gets what is printed.
        environment: Of this process from now on.
        mapped: Map and unmap every large block of memory by itself, so that peak RSS measures the engine and not glibc.
        about: The arguments of a Worker.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    if mapped:
        map_large_blocks()
    torch.set_num_threads(1)
    try:
        worker = Worker(*about)
        pipe.send({"ready": True})
        while True:
            command = pipe.recv()
            pipe.send({"steps": worker.steps, "memory": worker.memory}[command["do"]](command["count"]))
    except EOFError:
        pass
    except Exception as error:  # whatever a peer raises belongs into its row
        text = str(error).strip().splitlines() or [""]
        pipe.send({"error": f"{type(error).__name__}: {text[0]}"})
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
