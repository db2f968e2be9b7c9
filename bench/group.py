"""Group: the processes of one engine on one workload, and what they answer."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench import worker

ANSWER_S = 150
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["bench.worker", "torch.distributed.fsdp", "torch.nn.parallel"])
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29591",
}


class GroupError(Exception):
    """A rank failed, ended or fell silent; the text is for the table."""


class Group:
    """N worker processes. A context manager: when it is left, its processes have ended.

    They are forked from one that has loaded what all engines need: so that takes a second, where N programs would take ten.

    Args:
        engine, workload: Names, as `bench.worker` takes them.
        mapped: Give every large block of memory a mapping of its own, for a memory run.

    Attributes:
        error: Why the group is gone, or None.
    """

    def __init__(self, engine: str, workload: str, world_size: int, mapped: bool = False) -> None:
        self.engine, self.error = engine, None
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = Path(self._folder.name) / "log"
        self._pipes: list[Connection] = []
        self._ranks: list[multiprocessing.Process] = []
        for rank in range(world_size):
            mine, theirs = _processes.Pipe()
            environment = {**_ENVIRONMENT, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            about = (engine, workload, rank, world_size, f"{self._folder.name}/store")
            self._ranks.append(_processes.Process(target=worker.serve, args=(theirs, str(self._log), environment, mapped, *about), daemon=True))
            self._ranks[-1].start()
            theirs.close()
            self._pipes.append(mine)
        self._ready = False

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Wait until every rank has its model. Raises GroupError."""
        if not self._ready:
            self._answers()
            self._ready = True

    def ask(self, do: str, count: int) -> list[dict[str, Any]]:
        """Let every rank do something, at the same time. Returns the answers in rank order. Raises GroupError, from then on always."""
        self.wait_ready()
        self._check()
        for pipe in self._pipes:
            try:
                pipe.send({"do": do, "count": count})
            except OSError as error:
                self._fail(f"a rank ended ({error.strerror})")
        return self._answers()

    def close(self) -> None:
        """End this group's processes, by id."""
        for rank in self._ranks:
            rank.kill()
        for rank, pipe in zip(self._ranks, self._pipes, strict=True):
            rank.join()
            pipe.close()
        self._ranks, self._pipes = [], []
        self._folder.cleanup()

    def _answers(self) -> list[dict[str, Any]]:
        self._check()
        deadline, found = time.monotonic() + ANSWER_S, {}
        while len(found) < len(self._ranks):
            ready = wait([pipe for pipe in self._pipes if pipe not in found], max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail(f"no answer in {ANSWER_S} s")
            for pipe in ready:
                try:
                    found[pipe] = pipe.recv()
                except (EOFError, OSError):
                    self._fail("a rank ended without a word")
                if "error" in found[pipe]:
                    self._fail(found[pipe]["error"])
        return [found[pipe] for pipe in self._pipes]

    def _check(self) -> None:
        if self.error:
            raise GroupError(self.error)

    def _fail(self, error: str) -> None:
        self.error = error
        for rank in self._ranks:
            rank.kill()
        raise GroupError(error)
