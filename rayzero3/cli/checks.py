"""Checks: all that is known to be wrong with a submission before anything starts, and before it is sent to a cluster that can't run it."""

from __future__ import annotations

from rayzero3.cli.jobs import Jobs
from rayzero3.config import Job
from rayzero3.errors import ClusterError, ConfigError


def check_data(job: Job, elsewhere: bool) -> bool:
    """Check the token shards against their manifest and the model.

    Args:
        job: The job.
        elsewhere: Whether the job runs on other machines, which may see folders that this one does not.

    Returns:
        False if the folder is not on this machine but may be on the cluster; the job's driver then checks it.

    Raises:
        DataError: the shards are missing, or not what their manifest says.
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    from rayzero3.data.manifest import Manifest, check_shards

    if elsewhere and not job.data.path.exists():
        return False
    manifest = Manifest.load(job.data.path)
    check_shards(job.data.path, manifest)
    if job.model.vocab_size is not None and job.model.vocab_size < manifest.vocab_size:
        given, needed = job.model.vocab_size, manifest.vocab_size
        raise ConfigError("model.vocab_size", given, f"the tokenizer has {needed} tokens", "Raise it, or leave it out.")
    return True


def check_capacity(job: Job, jobs: Jobs) -> None:
    """Refuse a job that the whole cluster can't hold, even with nothing else on it.

    Raises:
        ClusterError: it has too few GPUs, or for CPU workers too few logical CPUs.
    """
    has, count = jobs.resources(), job.workers.count
    gpu = job.workers.device == "gpu" or (job.workers.device == "auto" and has["GPU"] >= 1)
    kind = "GPU" if gpu else "CPU"
    if count <= has[kind]:
        return
    inventory = f"the cluster at {jobs.address} has {has['GPU']:g} GPUs and {has['CPU']:g} CPUs"
    if has[kind] >= 1:
        do = f"Set workers.count to at most {has[kind]:g}, or add nodes."
    else:
        do = "Set workers.device: cpu, or use a cluster with GPUs (--address)."
    if not gpu and jobs.own_head:
        do += " Or `rayzero3 cluster down` and submit again: a new head is sized for the job."
    raise ClusterError("workers.count", count, f"each worker takes one {kind}, and {inventory}", do)


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
