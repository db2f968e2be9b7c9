"""Models: the commands that use what a run has made: export, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rayzero3.cli import show
from rayzero3.cli.commands import connect_or_start, follow_job, note


def export(checkpoint: Path, out: Path, dtype: str | None) -> int:
    """Write a checkpoint as a Hugging Face folder."""
    from rayzero3.checkpoint.export import export as write

    files = write(checkpoint, out, dtype)
    size = sum(file.stat().st_size for file in files)
    show.facts({"folder": str(out), "files": ", ".join(file.name for file in files), "size": f"{size / 2**20:,.1f} MiB"})
    return 0


def generate(values: dict[str, Any], address: str | None) -> int:
    """Continue prompts, here or on the workers of a cluster."""
    from rayzero3.train.generate import Request, check, in_this_process, lines

    request = Request(**values)
    if request.workers == 1 and address is None:
        for line in lines(request, in_this_process(request)):
            click.echo(line)
        return 0
    if request.model.exists():
        check(request)
    else:
        note(f"{request.model} is not on this machine; the job will check it on the cluster.")
    jobs, _ = connect_or_start(address, request.workers, request.device)
    return follow_job(jobs, jobs.submit_generate(request.model_dump_json()))
