"""Models: the commands that use what a run has made: export, generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rayzero3.cli import show
from rayzero3.cli.commands import cluster_for, follow_job, note
from rayzero3.config.sections import WorkersSection


def export(checkpoint: Path, out: Path, dtype: str | None) -> int:
    """Write a checkpoint as a Hugging Face folder."""
    from rayzero3.checkpoint.export import export as write

    files = write(checkpoint, out, dtype)
    size = sum(file.stat().st_size for file in files)
    show.facts({"folder": str(out), "files": ", ".join(file.name for file in files), "size": f"{size / 2**20:,.1f} MiB"})
    return 0


def generate(values: dict[str, Any], address: str | None) -> int:
    """Continue prompts, here or on the workers of a cluster. Standard output gets the texts and nothing else."""
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
    jobs = cluster_for(WorkersSection(count=request.workers, device=request.device), address)
    texts = Texts(request.prompts)
    code = follow_job(jobs, jobs.submit_generate(request.model_dump_json()), texts.take)
    texts.end()
    return code


class Texts:
    """Parts a job's log: the texts to standard output, the rest to standard error.

    Args:
        prompts: What the texts continue, in order.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self._rest = ""
        self._starts = tuple({json.dumps({"prompt": prompt}, ensure_ascii=False)[:-1] + "," for prompt in prompts})

    def take(self, text: str) -> None:
        """The log's next piece, of any length."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            click.echo(line, err=not line.startswith(self._starts))

    def end(self) -> None:
        """The log is over, with or without the end of a line."""
        if self._rest:
            self.take("\n")
