"""Processes: those that we started, told from others by their start time, and ended with all that they started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayzero3.errors import ClusterError

if TYPE_CHECKING:
    import psutil

SAME_START_S = 5.0
"""Two readings of one process's start time may differ by a corrected clock; a process id is not given out again so soon."""


@dataclass(frozen=True)
class Started:
    """A process that we started.

    Attributes:
        pid: Its id, which the system may give to another process after its end.
        time: When it started, Unix time.
    """

    pid: int
    time: float

    @classmethod
    def of(cls, pid: int) -> Started:
        """The process that has this id now."""
        return cls(pid, _psutil().Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        psutil = _psutil()
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.time) < SAME_START_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def end(started: list[Started], grace_s: float = 20.0) -> None:
    """End these processes and all their descendants: ask, wait, then kill. Those that have ended are passed over.

    Raises:
        ClusterError: some of them can't be killed.
    """
    psutil = _psutil()
    roots = [process for one in started if (process := one.process())]
    tree = {process for root in roots for process in [root, *_descendants(root)]}
    for root in roots:
        _signal(root.terminate)
    alive = _wait(tree, grace_s)
    for process in {inner for process in alive for inner in [process, *_descendants(process)]}:
        _signal(process.kill)
    left = _wait(alive, 10.0)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise ClusterError("processes of the cluster", f"still there: {pids}", "they survived SIGKILL", "End them by hand.")
    psutil.wait_procs(roots, timeout=0)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except _psutil().NoSuchProcess:
        return []


def _signal(send) -> None:
    try:
        send()
    except _psutil().NoSuchProcess:
        pass


def _wait(processes: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Those that still run after so many seconds. A zombie does not run: where nobody collects it, it stays for ever."""
    until = time.monotonic() + seconds
    while (alive := {process for process in processes if _runs(process)}) and time.monotonic() < until:
        time.sleep(0.1)
    return alive


def _runs(process: psutil.Process) -> bool:
    psutil = _psutil()
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _psutil():
    """Ray ships its own copy and puts it on the path."""
    import ray  # noqa: F401
    import psutil

    return psutil
