"""Launch: the driver of a job on the cluster. `python -m rayzero3.train.launch job.yaml` is the entrypoint that `submit` gives to Ray."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME

from rayzero3.checkpoint.format import newest
from rayzero3.config import Job, load_job
from rayzero3.data.manifest import SPLITS
from rayzero3.data.pack import packing_index
from rayzero3.errors import RayZero3Error, TrainingError
from rayzero3.train.check import Resources, check_data
from rayzero3.train.process_group import ProcessGroup
from rayzero3.train.progress import Progress
from rayzero3.train.run import Run
from rayzero3.train.summary import comparison, loss_curve, next_commands
from rayzero3.train.trainee import check_model
from rayzero3.train.worker import train_worker

POLL_S = "0.2"
"""Seconds between two looks of Ray Train's controller at its workers: how long a report blocks and a death goes unseen."""

STOPPED = 130
"""Exit code of a run that was asked to stop."""


def fit(job: Job) -> None:
    """Train a job on the cluster that this process is connected to, to its end, restarts included.

    Raises:
        ClusterError: the cluster can't hold the workers.
        TrainingError: workers failed more often than the job allows; the error shows rank and cause.
    """
    run = Run(job.run_folder)
    resources, before = Resources.of(job.workers, ray.cluster_resources()), run.last_attempt()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"job": job.model_dump(mode="json"), "data_cpus": resources.data_cpus},
        torch_config=ProcessGroup(timeout_s=round(job.workers.timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=job.workers.count,
            use_gpu=resources.gpu,
            resources_per_worker={"CPU": resources.worker_cpus, **({"GPU": 1} if resources.gpu else {})},
            placement_strategy="PACK" if resources.gpu else "SPREAD",
        ),
        run_config=RunConfig(
            name=job.name, storage_path=str(job.storage), failure_config=FailureConfig(max_failures=job.workers.max_restarts)
        ),
    )
    # Where to go on is for our manifests to say. Ray's own note of the checkpoints of an earlier driver would stop this one if one is gone.
    (job.run_folder / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).unlink(missing_ok=True)
    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        attempt = run.last_attempt()
        raise _explain(run, attempt if attempt > before else 0, error.worker_failures) from None
    except ray.train.TrainingFailedError as error:
        raise TrainingError("training failed", None, str(error), "See the driver's log above.") from None


def _explain(run: Run, attempt: int, failures: dict[int, Exception]) -> TrainingError:
    """Name the rank whose failure is a cause, not a consequence, the step, and where its traceback is.

    Args:
        attempt: The one that failed last; 0 if it failed before it had a number.
    """
    causes = {rank: getattr(error, "cause", None) or error for rank, error in failures.items()}
    rank = min(causes, key=lambda rank: ("CollectiveError" in type(causes[rank]).__name__, rank))
    text = str(causes[rank]).strip()
    file = run.error_file(rank, attempt)
    where = file.read_text(encoding="utf-8").splitlines()[0] if file.exists() else f"rank {rank}"
    traceback = f"Its traceback is in {file}." if file.exists() else "It left no traceback: killed, or out of memory."
    return TrainingError(f"training failed: {where}", None, text.splitlines()[-1] if text else None, traceback)


def run_job(job: Job) -> int:
    """Check, lock, train and sum up. The exit code: 0, or 130 if the run was asked to stop before its last step."""
    manifest = check_data(job)
    for note in check_model(job, manifest.vocab_size):
        print(f"note: {note}", flush=True)
    for split in filter(manifest.tokens, SPLITS):
        packing_index(job.data.path, manifest, split, job.data.sequence_length)
    run = Run(job.run_folder)
    ray.init(log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    with run.lock(os.environ.get("RAYZERO3_JOB_ID", str(os.getpid()))):
        (run.folder / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
        run.stop.unlink(missing_ok=True)
        _stop_on_sigterm(run)
        found = newest(run.checkpoints)
        if found is not None and found[1].step >= job.train.steps:
            print(f"the run is at step {found[1].step} of {job.train.steps} already: nothing to train")
        else:
            with Progress(job, run):
                fit(job)
            step = newest(run.checkpoints)[1].step
            if step < job.train.steps:
                print(f"stopped after step {step}, which is saved; submit the job again to go on", flush=True)
                return STOPPED
    print(loss_curve(run), *([comparison(job, run)] if manifest.tokens("validation") else []), next_commands(job), sep="\n\n", flush=True)
    return 0


def _stop_on_sigterm(run: Run) -> None:
    """Turn the end that Ray announces to a stopped job into a request that every rank finds in the run's folder.

    Set after ray.init, which sets a handler of its own. It raises nothing: the workers save, return, and `fit` ends by itself.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: run.stop.touch())


def main(path: str) -> int:
    """Run the job of a file; the exit code."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    try:
        return run_job(load_job(path))
    except RayZero3Error as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
