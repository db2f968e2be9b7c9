"""Progress: the driver's view of a run, read from the run's files and printed as plain lines. Nothing is scraped from any output."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from pathlib import Path
from typing import Any

from rayzero3.config import Job
from rayzero3.train.run import Run, Tail

POLL_S = 0.5
LINE_EVERY_S = 5.0
"""Seconds between two lines about steps; events are printed as they come."""


class Progress:
    """Print a run's steps and events while the body of a `with` runs, from what its files grow by.

    What the files hold before belongs to an earlier driver and is not shown. A second thread reads; `with` ends when it has read everything.
    """

    def __init__(self, job: Job, run: Run) -> None:
        self._job = job
        self._events, self._metrics = Tail(run.events), Tail(run.metrics)
        self._events.fresh()
        self._metrics.fresh()
        self._last: dict[str, Any] | None = None
        self._seconds: deque[float] = deque(maxlen=50)
        self._since_line_s = LINE_EVERY_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._since_line_s += POLL_S
            self._tell()
        self._since_line_s = LINE_EVERY_S
        self._tell()

    def _tell(self) -> None:
        events = self._events.fresh()
        if lines := self._metrics.fresh():
            self._last = lines[-1]
            self._seconds.extend(line["seconds"] for line in lines)
        if self._last and (self._since_line_s >= LINE_EVERY_S or events):
            print(self._step_line(self._last), flush=True)
            self._last, self._since_line_s = None, 0.0
        for event in events:
            print(self._event_line(event), flush=True)

    def _step_line(self, last: dict[str, Any]) -> str:
        steps = self._job.train.steps
        norm = "overflow" if last["grad_norm"] is None else f"{last['grad_norm']:.3f}"
        mfu = "" if last["mfu"] is None else f"MFU {last['mfu']:.1%}  "
        left_s = (steps - last["step"]) * statistics.median(self._seconds)
        return (
            f"step {last['step']:>{len(str(steps))}}/{steps}  loss {last['loss']:.4f}  gradient norm {norm}  "
            f"{last['tokens_per_s']:,.0f} tokens/s  {mfu}{duration(left_s)} left"
        )

    def _event_line(self, event: dict[str, Any]) -> str:
        if event["event"] == "start":
            what = "started" if event["checkpoint"] is None else f"goes on after step {event['step']}, from {event['checkpoint']}"
            first = f"attempt {event['attempt']} {what} on {event['workers']} {event['device'].split(':')[0]} workers"
            return f"{first}\n  dtypes: {event['dtypes']}\n  memory of each worker: {event['memory']}\n  computation: {event['flops']}"
        if event["event"] == "validation":
            average = f", of the averaged weights {event['average_loss']:.4f}" if "average_loss" in event else ""
            return f"step {event['step']}  validation loss {event['loss']:.4f}, perplexity {event['perplexity']:.2f}{average}" + "".join(
                f"\n  {prompt!r} goes on {text!r}" for prompt, text in zip(self._job.validation.prompts, event.get("texts", ()), strict=False)
            )
        return f"step {event['step']}  checkpoint {Path('checkpoints', event['folder'])}"


def duration(seconds: float) -> str:
    """`45s`, `3m 20s`, `2h 05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m {whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h {whole % 3600 // 60:02d}m"
