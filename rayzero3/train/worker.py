"""The worker: what one actor of Ray Train does, from its start to the end of the run."""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode
from ray.util.metrics import Gauge

from rayzero3.checkpoint.format import Manifest as CheckpointManifest
from rayzero3.checkpoint.format import Position, folder_name, newest, prune
from rayzero3.checkpoint.load import load
from rayzero3.checkpoint.save import save
from rayzero3.config import Job, parse_job
from rayzero3.data.manifest import TOKENIZER, Manifest
from rayzero3.data.stream import training_batches, validation_batches
from rayzero3.data.tokenizer import read_tokenizer
from rayzero3.engine import predict
from rayzero3.models.flops import peak_flops
from rayzero3.models.generate import Sampling
from rayzero3.train.loop import steps
from rayzero3.train.metrics import Gauges, Metrics
from rayzero3.train.run import Run
from rayzero3.train.step import validation_loss
from rayzero3.train.text import continue_texts
from rayzero3.train.trainee import Trainee, build, dtypes


class Worker:
    """One rank of one attempt.

    Args:
        job: The job.
        data_cpus: Logical CPUs that this worker's data tasks may take.
    """

    def __init__(self, job: Job, data_cpus: float) -> None:
        context = ray.train.get_context()
        self.job, self.data_cpus, self.run = job, data_cpus, Run(job.run_folder)
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = ray.train.torch.get_device()
        self.step, self.attempt = 0, 0
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // context.get_local_world_size()))

    def train(self) -> None:
        """Start or resume, and go on to the job's last step."""
        job, run = self.job, self.run
        manifest = Manifest.load(job.data.path)
        trainee = build(job, manifest.vocab_size, self.rank, self.world_size, self.device)
        (self.attempt,) = self._from_first(trainee, run.new_attempt() if self.rank == 0 else 0)
        self.write_whereabouts()
        position = self._resume(trainee)
        self.step = position.step
        names = [layer.label for layer in trainee.model.all_layers() if layer.trainable is not None]
        length, batch = job.data.sequence_length, job.train.global_batch
        metrics = Metrics(run, self.rank, self.attempt, length, batch, self._gauges(), trainee.optimizer.scaler, names, trainee.flops_per_sample, self._peak_flops())
        batches = self._batches(position)
        for result in steps(job, trainee, batches, position.step, position.samples, self.device, run.stop.exists):
            self.step = result.step
            stop, last = metrics.log(result), result.step == job.train.steps
            validate = manifest.tokens("validation") and (last or result.step % job.validation.every_steps == 0)
            checkpoint = stop or last or result.step % job.checkpoint.every_steps == 0
            if validate or checkpoint:
                stop = metrics.flush() or stop
            if validate:
                self._validate(trainee)
            if checkpoint or stop:
                self._checkpoint(trainee, Position(result.step, result.samples))
            if stop:
                break

    def _peak_flops(self) -> float | None:
        """FLOP/s of all workers together, taken to be alike; None where it is not known."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        peak = peak_flops(name, self.job.train.compute_dtype)
        return None if peak is None else peak * self.world_size

    def _flops_line(self, trainee: Trainee) -> str:
        tflops = f"{trainee.flops_per_sample / 1e12:.3g} TFLOP a sample"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "a CPU"
        peak = self._peak_flops()
        return f"{tflops}; MFU is null, since the peak of {name} is not known" if peak is None else f"{tflops}; peak {peak / 1e12:.4g} TFLOP/s"

    def write_whereabouts(self) -> None:
        """Leave where this rank runs in the run's folder: worker.json with attempt, node, network and process id."""
        facts = {
            "attempt": self.attempt,
            "node_id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
            "pid": os.getpid(),
        }
        (self.run.rank_folder(self.rank) / "worker.json").write_text(json.dumps(facts), encoding="utf-8")

    def write_traceback(self) -> None:
        """Leave the exception at hand in the run's folder, where no other rank's output mixes with it."""
        text = f"rank {self.rank}, after step {self.step}, in attempt {self.attempt} of {self.world_size} workers\n\n{traceback.format_exc()}"
        self.run.error_file(self.rank, self.attempt).write_text(text, encoding="utf-8")

    def _from_first(self, trainee: Trainee, *numbers: int) -> list[int]:
        """Rank 0's numbers, on every rank; the others' count as nothing."""
        own = torch.tensor(numbers if self.rank == 0 else [0] * len(numbers), device=self.device)
        return trainee.model.comm.sum_rows(own, "rank 0 decides").tolist()

    def _resume(self, trainee: Trainee) -> Position:
        """Load the newest whole checkpoint, the one that rank 0 finds, or stay at the initial weights."""
        found = newest(self.run.checkpoints) if self.rank == 0 else None
        step, attempt = self._from_first(trainee, *((found[1].step, found[1].attempt) if found else (0, 0)))
        folder = self.run.checkpoints / folder_name(step, attempt) if step else None
        position = Position(0, 0) if folder is None else load(folder, CheckpointManifest.read(folder), self.job, trainee.model, trainee.optimizer, trainee.source)
        if self.rank == 0:
            self.run.forget_after(step)
            source = folder.name if folder else None
            self.run.event(
                "start",
                attempt=self.attempt,
                step=step,
                checkpoint=source,
                workers=self.world_size,
                device=str(self.device),
                dtypes=dtypes(self.job),
                flops=self._flops_line(trainee),
                memory=str(predict(trainee.model, trainee.optimizer, self.job.train.reduce_every == "step", self.job.train.keep_fetched_bytes)),
            )
            prune(self.run.checkpoints, self.job.checkpoint.keep, self.attempt)
        return position

    def _batches(self, position: Position) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        job = self.job
        return training_batches(
            job.data.path,
            job.data.sequence_length,
            job.seed,
            position.samples,
            job.train.steps - position.step,
            job.train.global_batch,
            job.train.micro_batch,
            self.rank,
            self.world_size,
            self.data_cpus,
        )

    def _validate(self, trainee: Trainee) -> None:
        job = self.job
        batches = partial(
            validation_batches,
            job.data.path,
            job.data.sequence_length,
            job.validation.samples,
            job.train.micro_batch,
            self.rank,
            self.world_size,
        )
        losses: dict[str, Any] = {"loss": validation_loss(trainee, batches(), self.device)}
        losses["perplexity"] = math.exp(losses["loss"])
        if job.train.average_decay is not None:
            with trainee.optimizer.averaged():
                losses["average_loss"] = validation_loss(trainee, batches(), self.device)
        if job.validation.prompts:
            losses["texts"] = self._texts(trainee)
        if self.rank == 0:
            self.run.event("validation", attempt=self.attempt, step=self.step, **losses)

    def _texts(self, trainee: Trainee) -> list[str]:
        """How the model continues the job's prompts now."""
        job, manifest = self.job, Manifest.load(self.job.data.path)
        sampling = Sampling(job.validation.prompt_tokens, ends=frozenset([manifest.eod_id]))
        return continue_texts(trainee, read_tokenizer(job.data.path / TOKENIZER), job.validation.prompts, sampling, job.seed, self.device)

    def _checkpoint(self, trainee: Trainee, position: Position) -> None:
        folder = save(self.run.checkpoints, self.job, trainee.model, trainee.optimizer, position, self.attempt, trainee.source)
        if self.rank == 0:
            self.run.event("checkpoint", attempt=self.attempt, step=self.step, folder=folder.name)
            prune(self.run.checkpoints, self.job.checkpoint.keep, self.attempt)
        _report(folder, position.step)

    def _gauges(self) -> Gauges:
        tags = {"run": self.job.name, "rank": str(self.rank)}
        step, loss, speed = (
            Gauge(f"rayzero3_{name}", text, tag_keys=("run", "rank"))
            for name, text in (("step", "Last step done"), ("loss", "Nats per valid token, all ranks"), ("tokens_per_s", "Tokens per second, all ranks"))
        )

        def publish(done: int, nats: float, tokens_per_s: float) -> None:
            step.set(done, tags)
            loss.set(nats, tags)
            speed.set(tokens_per_s, tags)

        return publish


def _report(folder: Path, step: int) -> None:
    """Tell Ray Train of a checkpoint that is whole already: a barrier of one controller poll. The only call site; every rank comes here."""
    ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def train_worker(config: dict[str, Any]) -> None:
    """Entry point of every Ray Train worker; `config` holds the job as plain values and `data_cpus`."""
    worker = Worker(parse_job(config["job"]), config["data_cpus"])
    try:
        worker.train()
    except BaseException:
        worker.write_traceback()
        raise
