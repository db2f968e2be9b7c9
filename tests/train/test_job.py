"""The promises, on a real cluster of two raylets: the same run at any N, and nothing lost when a worker dies."""

from __future__ import annotations

import json
import math
import os
import threading
import time

import pytest

import rayzero3
from rayzero3.checkpoint.format import folders, newest
from rayzero3.config import load_job, parse_job
from rayzero3.errors import ClusterError, ConfigError, TrainingError
from rayzero3.train import launch
from rayzero3.train.process_group import interface_of
from rayzero3.train.run import Run, read_lines
from tests.faults import FailAt

pytestmark = pytest.mark.usefixtures("ray_cluster")
PATIENCE_S = 300
"""How long a test waits for a job to get going before it goes on, and fails."""


def job_of(storage, shards, workers=2, steps=10, **changes):
    raw = {
        "name": "small",
        "model": {"layers": 2, "width": 32, "heads": 2},
        "data": {"path": str(shards), "sequence_length": 32},
        "train": {"steps": steps, "global_batch": 7, "micro_batch": 2, "learning_rate": 1e-2, "warmup_steps": 2, "clip_norm": 1.0},
        "validation": {"every_steps": 5, "samples": "all", "prompts": ["def ", "import os"], "prompt_tokens": 4},
        "checkpoint": {"every_steps": 5},
        "workers": {"count": workers, "device": "cpu", "timeout_s": 30},
        "storage": str(storage),
    }
    return parse_job(raw | changes)


def samples_by_step(run):
    """Step -> the sorted sample ids that all ranks consumed in it; a step done twice counts the last time."""
    found = {}
    for path in sorted(run.folder.glob("rank-*/samples.jsonl")):
        for line in read_lines(path):
            found.setdefault((line["step"], line["attempt"]), []).extend(line["samples"])
    return {step: sorted(found[step, attempt]) for step, attempt in sorted(found)}


def losses(run):
    return [line["loss"] for line in read_lines(run.metrics)]


def validations(run, fact="loss"):
    return [event[fact] for event in read_lines(run.events) if event["event"] == "validation"]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, shards, tmp_path_factory):
    """Ten steps at N=2 that nothing disturbs."""
    job = job_of(tmp_path_factory.mktemp("undisturbed"), shards)
    assert rayzero3.run(job) == 0
    return Run(job.run_folder)


def assert_same_checkpoint(run, other):
    mine, theirs = newest(run.checkpoints)[1], newest(other.checkpoints)[1]
    assert mine.step == theirs.step == 10 and mine.samples == theirs.samples == 70
    assert mine.files == theirs.files, "weights and moments are the same, bit for bit"


def test_one_worker_runs_on_each_raylet(undisturbed):
    workers = [json.loads(path.read_text()) for path in sorted(undisturbed.folder.glob("rank-*/worker.json"))]
    assert len(workers) == 2 and len({worker["node_id"] for worker in workers}) == 2
    for worker in workers:
        assert worker["interface"] == interface_of(worker["address"]) is not None, "the process group binds to the node's own address"


def test_the_run_folder_tells_what_happened(undisturbed):
    lines = read_lines(undisturbed.metrics)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert lines[-1]["tokens"] == 10 * 7 * 32 and lines[-1]["loss"] < lines[0]["loss"]
    kinds = [event["event"] for event in read_lines(undisturbed.events)]
    assert kinds == ["start", "validation", "checkpoint", "validation", "checkpoint"]
    assert validations(undisturbed, "perplexity") == pytest.approx([math.exp(loss) for loss in validations(undisturbed)])
    assert all(len(texts) == 2 and any(texts) for texts in validations(undisturbed, "texts"))
    assert all(line["mfu"] is None for line in lines), "the peak of a CPU is not known"
    assert [folder.name for folder in folders(undisturbed.checkpoints)] == ["step-00000005.attempt-0001", "step-00000010.attempt-0001"]
    assert load_job(undisturbed.folder / "job.yaml").run_folder == undisturbed.folder


def test_the_same_samples_and_losses_at_another_size_and_with_other_settings(undisturbed, shards, tmp_path):
    """Four workers that hold two copies, offloaded, reduced and fetched once a step, averaged."""
    job = job_of(tmp_path, shards, workers=4)
    workers = job.workers.model_copy(update={"shard_group": 2})
    otherwise = {"offload": True, "reduce_every": "step", "keep_fetched_bytes": 2**20, "average_decay": 0.5}
    job = job.model_copy(update={"workers": workers, "train": job.train.model_copy(update=otherwise)})
    launch.run_job(job)
    run = Run(job.run_folder)
    start = next(event for event in read_lines(run.events) if event["event"] == "start")
    assert "moments fp32" in start["dtypes"] and "/ 2 + alignment" in start["memory"]
    assert samples_by_step(run) == samples_by_step(undisturbed)
    assert all(len(ids) == 7 for ids in samples_by_step(run).values())
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert validations(run) == pytest.approx(validations(undisturbed), rel=1e-5)
    assert validations(run, "texts") == validations(undisturbed, "texts")
    assert all(average not in (None, loss) for average, loss in zip(validations(run, "average_loss"), validations(run), strict=True))
    assert all("average_loss" not in event for event in read_lines(undisturbed.events))


def test_workers_killed_after_a_step_and_in_the_middle_of_a_save_cost_nothing_but_time(undisturbed, shards, tmp_path, monkeypatch):
    in_save = FailAt(1, 10, "kill in save", tmp_path / "struck in save")
    monkeypatch.setattr(launch, "train_worker", FailAt(0, 7, "kill", tmp_path / "struck", then=in_save))
    job = job_of(tmp_path, shards)
    launch.run_job(job)
    run = Run(job.run_folder)
    starts = [event for event in read_lines(run.events) if event["event"] == "start"]
    assert [(start["attempt"], start["step"]) for start in starts] == [(1, 0), (2, 5), (3, 5)] and in_save.marker.exists()
    assert losses(run) == losses(undisturbed)
    assert samples_by_step(run) == samples_by_step(undisturbed)
    assert_same_checkpoint(run, undisturbed)
    assert [folder.name for folder in folders(run.checkpoints)] == ["step-00000005.attempt-0001", "step-00000010.attempt-0003"]


def test_a_run_that_failed_at_two_workers_shows_why_and_goes_on_at_one(undisturbed, shards, tmp_path):
    first = job_of(tmp_path, shards, workers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "train_worker", FailAt(1, 6, "raise", tmp_path / "struck"))
        with pytest.raises(TrainingError, match="training failed: rank 1, after step 5, in attempt 1.*injected fault") as failure:
            launch.run_job(first.model_copy(update={"workers": first.workers.model_copy(update={"max_restarts": 0})}))
    (file,) = (first.run_folder / "rank-0001").glob("error-*.txt")
    assert str(file) in str(failure.value)
    assert 'raise ValueError("injected fault")' in file.read_text()
    launch.run_job(job_of(tmp_path, shards, workers=1))
    run = Run(first.run_folder)
    starts = [(event["workers"], event["step"]) for event in read_lines(run.events) if event["event"] == "start"]
    assert starts == [(2, 0), (1, 5)]
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert samples_by_step(run) == samples_by_step(undisturbed)
    assert validations(run) == pytest.approx(validations(undisturbed), rel=1e-5)
    assert validations(run, "texts") == validations(undisturbed, "texts")


def test_a_finished_run_submitted_again_trains_nothing(undisturbed, shards, capsys):
    job = job_of(undisturbed.folder.parent, shards)
    before = read_lines(undisturbed.events)
    launch.run_job(job)
    assert "nothing to train" in capsys.readouterr().out
    assert read_lines(undisturbed.events) == before


def test_a_run_that_is_alive_is_not_started_twice(shards, tmp_path):
    job = job_of(tmp_path, shards)
    with Run(job.run_folder).lock("job-of-mine"):
        with pytest.raises(ConfigError, match="the run small is alive; job job-of-mine holds"):
            launch.run_job(job)


def test_more_workers_than_the_cluster_has_are_refused_at_once(shards, tmp_path):
    job = job_of(tmp_path, shards, workers=9)
    with pytest.raises(ClusterError, match="the number of workers is 9; each worker takes one CPU, and the cluster has 0 GPUs and 8 CPUs"):
        launch.run_job(job)
    gpus = job.model_copy(update={"workers": job.workers.model_copy(update={"device": "gpu", "count": 8})})
    with pytest.raises(ClusterError, match="the number of workers is 8; each worker takes one GPU, and the cluster has 0 GPUs"):
        launch.run_job(gpus)
    assert not os.path.exists(job.run_folder / "events.jsonl")


def test_a_run_that_is_asked_to_stop_saves_the_step_it_is_at_and_goes_on_from_there(shards, tmp_path):
    """With a checkpoint in every step, where the request is read with the checkpoint's own look at the metrics."""
    job = job_of(tmp_path, shards, steps=100_000, checkpoint={"every_steps": 1})
    run = Run(job.run_folder)

    def ask():
        until = time.monotonic() + PATIENCE_S
        while len(read_lines(run.metrics)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        run.stop.touch()

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    assert launch.run_job(job) == launch.STOPPED
    asker.join()
    stopped = newest(run.checkpoints)[1].step
    assert 3 <= stopped < 100_000 and [line["step"] for line in read_lines(run.metrics)] == list(range(1, stopped + 1))
    assert launch.run_job(job_of(tmp_path, shards, steps=stopped + 2)) == 0
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, stopped + 3))
