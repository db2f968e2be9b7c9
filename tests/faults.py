"""FailAt: the fault injector. It stands in for the worker's entry point, does what that does, and strikes once."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FailAt:
    """Strike rank `rank` at step `step`, once.

    Args:
        how: "kill" ends the process with SIGKILL after the step; "raise" raises ValueError there; "kill in save" ends it when half of
            its file of the checkpoint of that step is written.
        marker: File that remembers that the fault has struck.
        then: Another fault, for the attempt that follows.
    """

    rank: int
    step: int
    how: str
    marker: Path
    then: FailAt | None = None

    def __call__(self, config: dict[str, Any]) -> None:
        import ray.train

        from rayzero3.train import worker

        self._arm(ray.train.get_context().get_world_rank())
        worker.train_worker(config)

    def _arm(self, rank: int) -> None:
        from rayzero3.checkpoint import save
        from rayzero3.train import worker

        if rank == self.rank and self.how == "kill in save":
            save._write = self._half(save._write)
        elif rank == self.rank:
            worker.steps = self._after(worker.steps)
        if self.then is not None and self.marker.exists():
            self.then._arm(rank)

    def _after(self, steps):
        def struck(*args):
            for result in steps(*args):
                if result.step == self.step and self._first_time():
                    if self.how == "raise":
                        raise ValueError("injected fault")
                    os.kill(os.getpid(), signal.SIGKILL)
                yield result

        return struck

    def _half(self, write):
        def struck(path, tensors):
            if f"step-{self.step:08d}" in path.parent.name and self._first_time():
                write(path, tensors)
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, tensors)

        return struck

    def _first_time(self) -> bool:
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
