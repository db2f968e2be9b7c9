"""Run: the folder of one named run: its lock, its attempts, its files.

    RUN/
        job.yaml             the job as it was submitted last
        metrics.jsonl        one line a step, written by rank 0
        events.jsonl         starts, restarts, validations, checkpoints
        rank-0000/ ...       what one rank alone knows: samples.jsonl, worker.json, and error-ATTEMPT.txt with its traceback
        checkpoints/         see rayzero3.checkpoint.format
        attempts/            one empty file per start of the worker group
        stop                 there while the run is asked to save itself and end
        lock                 held while a driver of this run lives
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayzero3.errors import ConfigError


class Run:
    """Paths and small files of a run's folder. Cheap to make; creates nothing until something is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.metrics, self.events = self.folder / "metrics.jsonl", self.folder / "events.jsonl"
        self.checkpoints, self.stop = self.folder / "checkpoints", self.folder / "stop"

    def rank_folder(self, rank: int) -> Path:
        """Made if it is not there."""
        path = self.folder / f"rank-{rank:04d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def error_file(self, rank: int, attempt: int) -> Path:
        """Where a rank writes its traceback."""
        return self.rank_folder(rank) / f"error-{attempt:04d}.txt"

    @contextmanager
    def lock(self, owner: str) -> Iterator[None]:
        """Hold the run. The lock dies with the process that holds it, however that dies.

        Raises:
            ConfigError: another driver holds it; the error names it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "another job"
                raise ConfigError(
                    f"the run {self.folder.name} is alive",
                    None,
                    f"job {holder} holds {self.folder}",
                    f"Follow it with `rayzero3 logs {self.folder.name}`, stop it, or give this job another name.",
                ) from None
            file.truncate(0)
            file.write(owner)
            file.flush()
            yield

    def last_attempt(self) -> int:
        """The last attempt's number; 0 if there was none."""
        return max((int(path.name) for path in (self.folder / "attempts").glob("*")), default=0)

    def new_attempt(self) -> int:
        """The next attempt's number, from 1; never given out twice."""
        folder = self.folder / "attempts"
        folder.mkdir(parents=True, exist_ok=True)
        number = self.last_attempt() + 1
        while True:
            try:
                os.close(os.open(folder / f"{number:04d}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                number += 1

    def event(self, kind: str, **facts: Any) -> None:
        """Append to events.jsonl."""
        append_line(self.events, {"event": kind, "time": round(time.time(), 3), **facts})

    def forget_after(self, step: int) -> None:
        """Drop metrics of steps that will be done again."""
        kept = [line for line in read_lines(self.metrics) if line["step"] <= step]
        temporary = self.metrics.with_suffix(".part")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.metrics)


def append_line(path: Path, facts: dict[str, Any]) -> None:
    """Add one JSON line, whole."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


class Tail:
    """What a file of JSON lines grows by. A file that was replaced by another is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, None

    def fresh(self) -> list[dict[str, Any]]:
        """The whole lines that have come since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_ino != self._inode:
                self._offset, self._inode = 0, os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            *whole, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        return [json.loads(line) for line in whole]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none if it is not there. A last line that is still being written is left out."""
    return Tail(path).fresh()
