"""The parts of training that need no cluster: the loop at any N, the schedule, the run's folder, progress, the interface."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

from rayzero3.errors import CollectiveError, ConfigError, TrainingError
from rayzero3.train.check import Resources
from rayzero3.train.launch import _explain
from rayzero3.train.loop import StepResult, steps
from rayzero3.train.metrics import Metrics
from rayzero3.train.process_group import _Backend, interface_of
from rayzero3.train.progress import duration
from rayzero3.train.run import Run, Tail, append_line, read_lines
from rayzero3.train.schedule import learning_rate
from rayzero3.train.trainee import build
from tests.jobs import VOCABULARY, random_batches, small_job
from tests.ranks import run_ranks


def loop(rank, world_size, job):
    trainee = build(job, VOCABULARY, rank, world_size, torch.device("cpu"))
    model, optimizer = trainee.model, trainee.optimizer
    results = steps(job, trainee, random_batches(job, 0, rank, world_size), 0, 0, torch.device("cpu"))
    return [(result.step, float(result.loss), float(result.grad_norm), result.samples, result.own_ids) for result in results]


def test_two_hundred_steps_have_the_same_losses_at_one_two_and_three_ranks(tmp_path):
    job = small_job(tmp_path, train={"steps": 200, "learning_rate": 3e-3, "warmup_steps": 10})
    one, *others = [run_ranks(loop, size, job) for size in (1, 2, 3)]
    for other in others:
        assert [line[1] for line in other[0]] == pytest.approx([line[1] for line in one[0]], rel=1e-5)
        assert [line[3] for line in other[0]] == [line[3] for line in one[0]]
        for step in range(200):
            assert sorted(sum((rank[step][4] for rank in other), [])) == sorted(one[0][step][4]) == list(range(7))


@pytest.mark.parametrize("changes", [{"reduce_every": "step"}, {"recompute_every": 1}, {"recompute_every": 2, "reduce_every": "step"}])
def test_when_to_reduce_and_recompute_changes_nothing_but_rounding(tmp_path, changes):
    reference = run_ranks(loop, 2, small_job(tmp_path))[0]
    other = run_ranks(loop, 2, small_job(tmp_path, train=changes))[0]
    assert [line[1] for line in other] == pytest.approx([line[1] for line in reference], rel=1e-5)
    assert [line[2] for line in other] == pytest.approx([line[2] for line in reference], rel=1e-4)


def test_fp16_with_its_loss_scale_follows_fp32(tmp_path):
    reference = run_ranks(loop, 2, small_job(tmp_path))[0]
    half = run_ranks(loop, 2, small_job(tmp_path, train={"compute_dtype": "fp16"}))[0]
    assert [line[1] for line in half] == pytest.approx([line[1] for line in reference], rel=2e-2)
    assert [line[2] for line in half] == pytest.approx([line[2] for line in reference], rel=5e-2), "gradients are unscaled before they are used"


@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_the_micro_batch_changes_nothing_but_rounding(tmp_path, micro_batch):
    reference = run_ranks(loop, 2, small_job(tmp_path, train={"micro_batch": 2}))[0]
    other = run_ranks(loop, 2, small_job(tmp_path, train={"micro_batch": micro_batch}))[0]
    assert [line[1] for line in other] == pytest.approx([line[1] for line in reference], rel=1e-5)
    assert [line[2] for line in other] == pytest.approx([line[2] for line in reference], rel=1e-4)


def test_the_schedule_warms_up_peaks_and_ends_where_it_says(tmp_path):
    train = small_job(tmp_path, train={"steps": 100, "warmup_steps": 10, "learning_rate": 1e-3}).train
    rates = [learning_rate(step, train) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1e-4) and rates[9] == max(rates) == pytest.approx(1e-3)
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(1e-4)
    without = small_job(tmp_path, train={"steps": 1, "warmup_steps": 0}).train
    assert learning_rate(1, without) == pytest.approx(without.final_rate)


def test_the_lock_dies_with_its_process_however_that_dies(tmp_path):
    code = f"import time\nfrom rayzero3.train.run import Run\nwith Run({str(tmp_path)!r}).lock('other-job'):\n print('held', flush=True)\n time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is alive; job other-job holds"):
            with Run(tmp_path).lock("mine"):
                pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with Run(tmp_path).lock("mine"):
        assert (tmp_path / "lock").read_text() == "mine"


def test_attempts_are_numbered_once_and_a_line_being_written_is_left_out(tmp_path):
    run = Run(tmp_path)
    assert [run.new_attempt() for _ in range(3)] == [1, 2, 3]
    for step in range(1, 6):
        append_line(run.metrics, {"step": step})
    with open(run.metrics, "a") as file:
        file.write('{"step": 6')
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3, 4, 5]
    run.forget_after(3)
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3]


def test_a_tail_sees_each_line_once_and_a_replaced_file_from_its_start(tmp_path):
    run = Run(tmp_path)
    tail = Tail(run.metrics)
    assert tail.fresh() == []
    append_line(run.metrics, {"step": 1})
    append_line(run.metrics, {"step": 2})
    assert tail.fresh() == [{"step": 1}, {"step": 2}] and tail.fresh() == []
    with open(run.metrics, "a") as file:
        file.write('{"st')
    assert tail.fresh() == []
    with open(run.metrics, "a") as file:
        file.write('ep": 3}\n')
    assert tail.fresh() == [{"step": 3}]
    run.forget_after(1)
    assert tail.fresh() == [{"step": 1}]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path):
    metrics = Metrics(Run(tmp_path), 0, 1, 8, 4, lambda *_: None, layers=["embedding", "block"])
    metrics.log(StepResult(4, torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.0), torch.tensor(-1), 0.1, 16, [1], 0.5))
    metrics.log(StepResult(5, torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(0.0), torch.tensor(1), 0.1, 20, [2], 0.5))
    assert [line["step"] for line in read_lines(Run(tmp_path).metrics)] == [4]
    with pytest.raises(TrainingError, match="step 5, layer block first, is loss 1.0, gradient norm nan"):
        metrics.flush()


def test_a_traceback_of_an_earlier_attempt_is_not_taken_for_this_ones(tmp_path):
    run = Run(tmp_path)
    run.error_file(1, 1).write_text("rank 1, after step 9, in attempt 1 of 2 workers\n\nTraceback")
    told = str(_explain(run, 1, {1: RuntimeError("it broke"), 0: CollectiveError("a consequence")}))
    assert "rank 1, after step 9" in told and "it broke" in told and str(run.error_file(1, 1)) in told
    told = str(_explain(run, 2, {1: RuntimeError("the actor died")}))
    assert "left no traceback" in told and "step 9" not in told


def test_the_cluster_is_shared_so_that_data_tasks_always_get_something(tmp_path):
    job = small_job(tmp_path, workers={"count": 2, "device": "cpu"})
    for cpus in (2, 3, 4, 64):
        share = Resources.of(job.workers, {"CPU": float(cpus)})
        assert share.worker_cpus <= 1 and share.data_cpus > 0
        assert 2 * (share.worker_cpus + share.data_cpus) == pytest.approx(cpus)


def test_the_interface_is_the_one_that_bears_the_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
    own = socket.gethostbyname_ex(socket.gethostname())[2]
    assert all(interface_of(address) for address in own)
    assert "on_start" in vars(_Backend) and _Backend.__mro__[1].__name__ == "_TorchBackend"


def test_durations_read_well():
    assert [duration(value) for value in (4.4, 200, 7500)] == ["4s", "3m 20s", "2h 05m"]
