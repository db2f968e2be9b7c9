"""Follow: a job's log on this terminal until the job ends, whatever happens to the connection.

A stream always begins at the log's start, so a new one is read up to where the last one broke. The job's final status decides how the
following ends, never the stream.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rayzero3.cli.jobs import Jobs
from rayzero3.errors import ClusterError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

SILENCE_S = 20.0
"""After so long without a line, ask whether the job still runs."""

STALE = 3
"""After so many silences in a row, open a new stream: a connection can be dead without a word."""

LOST_AFTER_S = 300.0
"""A cluster that has not answered for so long is given up."""


class Log:
    """What has been shown of a log that is read again from its start at every connection.

    Args:
        write: Takes what is new.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self.shown, self._read = write, 0, 0

    def restart(self) -> None:
        """What comes next is the log's start."""
        self._read = 0

    def take(self, text: str) -> None:
        """Show the part of the log's next piece that has not been shown."""
        new = text[max(0, self.shown - self._read) :]
        self._read += len(text)
        if new:
            self._write(new)
            self.shown = self._read


class Stream:
    """One connection to a job's log, read by a thread, so that Ctrl-C and time limits never wait for it.

    Args:
        jobs: The cluster's jobs.
        job_id: Whose log.
    """

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self._jobs, self._job_id = jobs, job_id
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._read())
        threading.Thread(target=self._run, daemon=True).start()

    def next(self, timeout_s: float) -> str | None:
        """The next piece; None when the stream has ended, however it ended. Raises queue.Empty after a silence."""
        return self._pieces.get(timeout=timeout_s)

    def close(self) -> None:
        """Give the connection up."""
        try:
            self._loop.call_soon_threadsafe(self._task.cancel)
        except RuntimeError:
            pass  # it has ended by itself

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except (Exception, asyncio.CancelledError):
            pass  # a stream may break in any way; the follower asks for the job's status and opens another
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._pieces.put(None)

    async def _read(self) -> None:
        async for piece in self._jobs.tail(self._job_id):
            self._pieces.put(piece)


def follow(
    jobs: Jobs, job_id: str, write: Callable[[str], object] | None = None, note: Callable[[str], object] = lambda text: None
) -> JobDetails:
    """Show a job's log as it comes, each line once, until the job has ended.

    Args:
        jobs: The cluster's jobs.
        job_id: Submission id.
        write: Where the log goes; standard output unless given.
        note: Takes a sentence when the connection breaks.

    Returns:
        The job's final state.

    Raises:
        ClusterError: the cluster has not answered for LOST_AFTER_S, or does not know the job any more.
    """
    log, pause = Log(write or _to_stdout), 0.5
    while True:
        shown = log.shown
        ended = _follow_stream(jobs, job_id, log)
        info = _info(jobs, job_id, note)
        if info.status.is_terminal():
            _show_rest(jobs, job_id, log)
            return info
        if not ended:
            continue
        # A stream that never works (a proxy without websockets) leaves this: the whole log now and then.
        _show_rest(jobs, job_id, log)
        pause = 0.5 if log.shown > shown else min(10.0, 2 * pause)
        time.sleep(pause)


def exit_code(info: JobDetails) -> int:
    """What the command line ends with, from a job's final state: 0 succeeded, 130 stopped, else the driver's own 1, 2 or 3."""
    if info.status.value == "SUCCEEDED":
        return 0
    if info.status.value == "STOPPED":
        return 130
    return info.driver_exit_code if info.driver_exit_code in (1, 2, 3) else 1


def _follow_stream(jobs: Jobs, job_id: str, log: Log) -> bool:
    """One connection. True if it ended, False if it was given up after silences or because the job has ended."""
    stream, silences = Stream(jobs, job_id), 0
    log.restart()
    try:
        while True:
            try:
                piece = stream.next(SILENCE_S)
            except queue.Empty:
                silences += 1
                if silences == STALE or _ended(jobs, job_id):
                    return False
                continue
            if piece is None:
                return True
            silences = 0
            log.take(piece)
    finally:
        stream.close()


def _ended(jobs: Jobs, job_id: str) -> bool:
    try:
        return jobs.info(job_id).status.is_terminal()
    except ClusterError:
        return True


def _info(jobs: Jobs, job_id: str, note: Callable[[str], object]) -> JobDetails:
    """The job's state, as soon as the cluster answers."""
    until, pause, told = time.monotonic() + LOST_AFTER_S, 0.5, False
    while True:
        try:
            info = jobs.info(job_id)
        except ClusterError as error:
            final = error.what.startswith("unauthorised") or "status code 404" in str(error.got)
            if final or time.monotonic() > until:
                raise
            if not told:
                note(f"connection lost; the job goes on if its cluster does. Trying again for {LOST_AFTER_S:g} s.")
                told = True
            time.sleep(pause)
            pause = min(10.0, 2 * pause)
            continue
        if told:
            note("connected again.")
        return info


def _show_rest(jobs: Jobs, job_id: str, log: Log) -> None:
    """What no stream has brought, by a plain request."""
    try:
        text = jobs.log(job_id)
    except ClusterError:
        return
    log.restart()
    log.take(text)


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
