"""Checks: what is known to be wrong with a submission on this cluster, before it is sent there."""

from __future__ import annotations

from rayzero3.cli.jobs import Jobs
from rayzero3.config import Job
from rayzero3.config.sections import WorkersSection
from rayzero3.errors import ClusterError, ConfigError
from rayzero3.train.check import Resources


def check_capacity(workers: WorkersSection, jobs: Jobs) -> None:
    """Refuse workers that the whole cluster can't hold. Raises ClusterError with what it has."""
    try:
        Resources.of(workers, jobs.resources())
    except ClusterError as error:
        if not jobs.own_head or workers.device == "gpu":
            raise
        do = f"{error.do} Or `rayzero3 cluster down` and submit again: a new head is sized for the job."
        raise ClusterError(error.what, error.got, error.expected, do) from None


def check_unique(job: Job, jobs: Jobs, suffix: str) -> None:
    """Refuse a second live job of one name: both would write to one run folder.

    Args:
        job: The job.
        jobs: The cluster's jobs.
        suffix: Options that every command for this cluster needs.

    Raises:
        ConfigError: one is waiting or running; the error names it.
    """
    live = jobs.live(job.name)
    if live is not None:
        raise ConfigError(
            f"a job named {job.name}",
            f"{live.status.value} already ({live.submission_id})",
            "a run has one writer",
            f"Follow it: `rayzero3 logs {job.name} --follow{suffix}`. Stop it: `rayzero3 stop {job.name}{suffix}`. Or set another name.",
        )
