"""Show: what the commands print about jobs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from rayzero3.cli.jobs import Jobs

STYLES = {"SUCCEEDED": "green", "FAILED": "red", "STOPPED": "yellow", "RUNNING": "cyan", "PENDING": "dim"}


def facts(rows: dict[str, str | None]) -> None:
    """A column of names and values, the values whole, so that they can be copied. Those that are None are left out."""
    console, width = Console(highlight=False, soft_wrap=True), max(map(len, rows))
    for name, value in rows.items():
        if value is not None:
            console.print(f"{name:<{width}}  {value}", markup=False)


def submitted(job_id: str, name: str, run_folder: Path, jobs: Jobs, token: str | None, suffix: str) -> None:
    """What a user needs right after a submit."""
    facts(
        {
            "job": job_id,
            "dashboard": f"{jobs.address}/#/jobs/{job_id}" + (f"  ({token})" if token else ""),
            "run folder": str(run_folder),
            "log": f"rayzero3 logs {name} --follow{suffix}",
            "state": f"rayzero3 status {name}{suffix}",
            "stop": f"rayzero3 stop {name}{suffix}",
        }
    )


def state(info: JobDetails, address: str) -> None:
    """One job, and how far its run is where its folder is readable from here."""
    folder, steps = info.metadata.get("run_folder"), info.metadata.get("steps")
    last = last_metrics(Path(folder) / "metrics.jsonl") if folder else None
    fresh = last is not None and last.get("time", float("inf")) * 1000 >= (info.start_time or 0)
    rows: dict[str, str | None] = {
        "job": info.submission_id,
        "state": info.status.value,
        "reason": _reason(info),
        "dashboard": f"{address}/#/jobs/{info.submission_id}",
        "started": clock(info.start_time),
        "time": duration(info),
        "run folder": folder,
        "step": None if last is None else f"{last['step']} of {steps}" + ("" if fresh else " (before this job)"),
        "loss": None if last is None else f"{last['loss']:.4f}",
        "gradient norm": None if last is None or last["grad_norm"] is None else f"{last['grad_norm']:.4f}",
        "tokens/s": None if last is None else f"{last['tokens_per_s']:,.0f} in all",
    }
    facts(rows)


def table(jobs: list[JobDetails]) -> None:
    """All jobs, newest first."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "JOB", "STATE", "STARTED", "TIME"):
        shown.add_column(title, overflow="fold")
    for info in jobs:
        status = info.status.value
        shown.add_row(info.metadata["name"], info.submission_id, f"[{STYLES[status]}]{status}[/]", clock(info.start_time), duration(info))
    Console(highlight=False).print(shown)


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file; None if there is none to read. Reads the file's last 64 KiB only."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the line that is being written
        if isinstance(found, dict) and {"step", "loss", "grad_norm", "tokens_per_s"} <= found.keys():
            return found
    return None


def clock(milliseconds: int | None) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000)) if milliseconds else "-"


def duration(info: JobDetails) -> str:
    """How long a job has run, or ran."""
    if not info.start_time:
        return "-"
    seconds = max(0, int((info.end_time or time.time() * 1000) - info.start_time)) // 1000
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _reason(info: JobDetails) -> str | None:
    """Why a job failed: Ray's own sentence, without the log that it appends."""
    if info.status.value != "FAILED" or not info.message:
        return None
    return info.message.split(", last available logs")[0].splitlines()[0]
