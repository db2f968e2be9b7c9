"""Commands: what each command of the CLI does. Loaded when one is called; Ray is imported once it is known which cluster to ask."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from rayzero3.cli import auth, head, show
from rayzero3.cli.checks import check_capacity, check_unique
from rayzero3.cli.follow import exit_code, follow
from rayzero3.cli.jobs import Jobs, connect, given_address
from rayzero3.config import load_job
from rayzero3.config.sections import WorkersSection
from rayzero3.errors import ClusterError
from rayzero3.train.check import check_data


def submit(file: str, address: str | None, overrides: tuple[str, ...], detach: bool) -> int:
    """Check the job, find or start the cluster, send the job, follow it. The exit code."""
    job = load_job(file, overrides)
    elsewhere = not _is_own(given_address(address))
    if elsewhere and not job.data.path.exists():
        note(f"{job.data.path} is not on this machine; the job will check it on the cluster.")
    else:
        check_data(job)
    suffix = _suffix(address)
    jobs = cluster_for(job.workers, address)
    check_unique(job, jobs, suffix)
    job_id = jobs.submit(job)
    show.submitted(job_id, job.name, job.run_folder, jobs, auth.token_hint(), suffix)
    return 0 if detach else _follow(jobs, job_id, job.name, suffix)


def status(name: str, address: str | None) -> int:
    """Show one job."""
    jobs = _connect(address)
    show.state(jobs.find(name), jobs.address)
    return 0


def logs(name: str, address: str | None, following: bool) -> int:
    """Show a job's log, as far as it is or to the job's end."""
    jobs = _connect(address)
    job_id = jobs.find(name).submission_id
    if following:
        return _follow(jobs, job_id, name, _suffix(address))
    click.echo(jobs.log(job_id), nl=False)
    return 0


def list_jobs(address: str | None) -> int:
    """Show all jobs of a cluster."""
    jobs = _connect(address)
    found = jobs.all()
    if found:
        show.table(found)
    else:
        click.echo(f"no jobs on the cluster at {jobs.address}")
    return 0


def stop(name: str, address: str | None) -> int:
    """Stop a job and wait for its end."""
    jobs = _connect(address)
    info = jobs.find(name)
    if info.status.is_terminal():
        click.echo(f"job {info.submission_id} has ended already: {info.status.value}")
        return 0
    note(f"stopping job {info.submission_id} ...")
    click.echo(f"job {info.submission_id}: {jobs.stop(info.submission_id).status.value}")
    return 0


def cluster_up(num_cpus: int | None, nodes: int) -> int:
    """Start our head, with so many raylets."""
    auth.use(own_head=True)
    found = head.find()
    if found is None:
        note("starting a Ray cluster on this machine, on loopback ...")
        found = head.start(num_cpus, nodes)
    else:
        note("a cluster of ours runs already; `rayzero3 cluster down` ends it.")
    jobs = connect(found.dashboard, own_head=True)
    has = jobs.resources()
    token = auth.token_hint()
    show.facts(
        {
            "cluster": f"{jobs.count_nodes()} nodes on this machine, {has['CPU']:g} CPUs, {has['GPU']:g} GPUs",
            "dashboard": found.dashboard + (f"  ({token})" if token else ""),
            "log": str(found.log),
            "submit": "rayzero3 submit JOB",
            "end": "rayzero3 cluster down",
        }
    )
    return 0


def cluster_down() -> int:
    """Stop the jobs of our head, then all of its processes."""
    auth.use(own_head=True)
    found = head.find()
    if found is not None:
        _stop_jobs(found)
    click.echo("no cluster of ours was running" if head.stop() is None else "cluster down")
    return 0


def tokenize(
    inputs: tuple[str, ...],
    out: Path,
    tokenizer: Path | None,
    vocab_size: int | None,
    pattern: str,
    exclude: tuple[str, ...],
    validation_fraction: float,
    text_key: str,
) -> int:
    """Write token shards with a Ray of this process's own."""
    auth.use(own_head=True)
    os.environ.update(head.ENVIRONMENT)
    import ray

    from rayzero3.data.tokenize import check_inputs
    from rayzero3.data.tokenize import tokenize as write_shards

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    paths = [Path(path) for path in inputs]
    check_inputs(paths, tokenizer, vocab_size, pattern, validation_fraction, exclude)  # before Ray takes its seconds to start
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        manifest = write_shards(paths, out, tokenizer, vocab_size, pattern, validation_fraction, text_key, exclude, tell=note)
    finally:
        ray.shutdown()
    counts = {split: f"{manifest.documents(split):,} documents, {manifest.tokens(split):,} tokens" for split in manifest.splits}
    skipped = f"{len(manifest.skipped)} files that are not text, listed in the manifest" if manifest.skipped else None
    show.facts({**counts, "vocabulary": f"{manifest.vocab_size:,} tokens", "skipped": skipped, "folder": str(out)})
    return 0


def note(text: str) -> None:
    """Say something that is not the command's result."""
    click.echo(text, err=True)


def follow_job(jobs: Jobs, job_id: str, write: Callable[[str], object]) -> int:
    """Give a job's log to `write` as it comes, to the job's end; Ctrl-C ends the following, not the job. The exit code."""
    return _follow(jobs, job_id, job_id, "" if jobs.own_head else f" --address {jobs.address}", write)


def _follow(jobs: Jobs, job_id: str, name: str, suffix: str, write: Callable[[str], object] | None = None) -> int:
    try:
        info = follow(jobs, job_id, write, note)
    except KeyboardInterrupt:
        note(f"\nno longer following; job {job_id} goes on.")
        note(f"follow it: rayzero3 logs {name} --follow{suffix}\nstop it:   rayzero3 stop {name}{suffix}")
        return 130
    sys.stdout.flush()
    note(f"job {job_id}: {info.status.value}")
    return exit_code(info)


def _is_own(address: str | None) -> bool:
    """Whether an address, or the lack of one, means the head that we start."""
    found = head.recorded()
    return address is None or (found is not None and found.dashboard == address)


def _suffix(address: str | None) -> str:
    """The option that a later command needs to find the same cluster."""
    return f" --address {address}" if address else ""


def _connect(option: str | None) -> Jobs:
    address = given_address(option)
    own = _is_own(address)
    auth.use(own)
    if address is None:
        found = head.find()
        if found is None:
            raise ClusterError(
                "no cluster: none was named, and no head of ours runs on this machine",
                None,
                None,
                "Run `rayzero3 cluster up` or `rayzero3 submit JOB`, or give --address.",
            )
        address = found.dashboard
    return connect(address, own)


def cluster_for(workers: WorkersSection, option: str | None) -> Jobs:
    """The cluster that the user means, or a head of ours, started where none runs. Raises ClusterError if it can't hold the workers."""
    auth.use(_is_own(given_address(option)))
    if given_address(option) is not None or head.find() is not None:
        jobs = _connect(option)
        check_capacity(workers, jobs)
        return jobs
    cores = os.cpu_count() or 1
    num_cpus = cores if workers.device == "gpu" else max(cores, workers.count + 2)
    note(f"no cluster was named and none of ours runs: starting a Ray head on this machine, on loopback, with {num_cpus} logical CPUs ...")
    jobs = connect(head.start(num_cpus).dashboard, own_head=True)
    try:
        check_capacity(workers, jobs)
    except ClusterError:
        head.stop()
        raise
    return jobs


def _stop_jobs(found: head.Head) -> None:
    """So that they can save themselves. A head that does not answer is ended all the same."""
    try:
        jobs = connect(found.dashboard, own_head=True)
        for info in jobs.all():
            if not info.status.is_terminal():
                note(f"stopping job {info.submission_id} ...")
                jobs.stop(info.submission_id)
    except ClusterError as error:
        note(f"jobs were not stopped first: {error}")
