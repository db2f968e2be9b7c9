"""Group: the processes of one engine on one workload, and what they answer."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ANSWER_S = 150
_ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29591",
    "PYTHONWARNINGS": "ignore",
}


class GroupError(Exception):
    """A rank failed, ended or fell silent; the text is for the table."""


class Group:
    """N worker processes. A context manager: when it is left, its processes have ended.

    Args:
        engine, workload: Names, as `bench.worker` takes them.
        extra: More environment, such as malloc's settings for a memory run.

    Attributes:
        error: Why the group is gone, or None.
    """

    def __init__(self, engine: str, workload: str, world_size: int, extra: dict[str, str] | None = None) -> None:
        self.engine, self.error = engine, None
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = open(Path(self._folder.name) / "log", "w+")
        self._ranks: list[subprocess.Popen] = []
        for rank in range(world_size):
            environment = {**os.environ, **_ENVIRONMENT, **(extra or {}), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            command = [sys.executable, "-m", "bench.worker", engine, workload, str(rank), str(world_size), f"{self._folder.name}/store"]
            self._ranks.append(
                subprocess.Popen(command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
            )
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
        for rank in self._ranks:
            try:
                rank.stdin.write(json.dumps({"do": do, "count": count}).encode() + b"\n")
                rank.stdin.flush()
            except OSError as error:
                self._fail(f"a rank ended ({error.strerror})")
        return self._answers()

    def close(self) -> None:
        """End this group's processes, by id."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()
        self._ranks = []
        self._log.close()
        self._folder.cleanup()

    def _answers(self) -> list[dict[str, Any]]:
        self._check()
        deadline, found = time.monotonic() + ANSWER_S, {}
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self._ranks):
                selector.register(rank.stdout, selectors.EVENT_READ, index)
            while len(found) < len(self._ranks):
                events = selector.select(max(deadline - time.monotonic(), 0))
                if not events:
                    self._fail(f"no answer in {ANSWER_S} s")
                for key, _ in events:
                    line = key.fileobj.readline()
                    if not line:
                        self._fail("a rank ended without a word")
                    answer = json.loads(line)
                    if "error" in answer:
                        self._fail(answer["error"])
                    found[key.data] = answer
                    selector.unregister(key.fileobj)
        return [found[index] for index in range(len(self._ranks))]

    def _check(self) -> None:
        if self.error:
            raise GroupError(self.error)

    def _fail(self, error: str) -> None:
        self.error = error
        for rank in self._ranks:
            rank.kill()
        raise GroupError(error)
