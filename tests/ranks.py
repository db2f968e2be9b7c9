"""run_ranks: run a function as every rank of a real gloo process group, one process a rank."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch._dynamo", "pytest", "ray.train", "transformers", "transformers.modeling_utils"),
        *("rayzero3.engine", "rayzero3.train.trainee", "rayzero3.checkpoint.load"),
    ]
)
"""What the tests' modules import, once for all ranks."""
TIMEOUT_S = 60


class RankFailed(AssertionError):
    """At least one rank raised; the text holds every rank's traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """`function(rank, world_size, *args)` on every rank. Returns what the ranks returned, in rank order; tensors travel by value.

    Args:
        function: A module-level function.
        timeout_s: Of the group's collectives; the ranks together get twice that.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(function, rank, world_size, args, Path(folder, "store"), theirs, timeout_s), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        results, failures = [], []
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            try:
                ok, value = pickle.loads(pipe.recv_bytes()) if pipe.poll(2 * timeout_s) else (False, "no answer in time")
            except EOFError:
                ok, value = False, "died without an answer"
            results.append(value)
            if not ok:
                failures.append(f"--- rank {rank}\n{value}")
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        if failures:
            raise RankFailed("\n".join(failures))
        return results


def _main(function: Callable, rank: int, world_size: int, args: tuple, store: Path, pipe: Any, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        present = dist.FileStore(f"{store}-present", world_size)
        present.set(str(rank), "here")  # a rank that starts late is not what a short timeout is to catch
        present.wait([str(peer) for peer in range(world_size)], timedelta(seconds=TIMEOUT_S))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
        pipe.send_bytes(pickle.dumps((True, function(rank, world_size, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
