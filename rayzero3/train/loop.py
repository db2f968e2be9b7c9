"""The loop: a generator of step results. It knows neither Ray nor where the batches come from, so a test can drive it step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from rayzero3.config import Job
from rayzero3.engine import LossScaler, Zero3Adam, Zero3Layer, Zero3Sequential, hybrid_mesh
from rayzero3.models.gpt_neox import gpt_neox, initialize
from rayzero3.train.schedule import learning_rate
from rayzero3.train.step import inputs_and_labels, train_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """What a step did. The tensors are read by the host one step late, so that it never waits for the device.

    Attributes:
        step: Counted from 1.
        loss: () nats per valid token, over all ranks.
        grad_norm: () global norm before clipping.
        stop: () ranks that were asked to stop; the same on all of them.
        first_overflow: () the first trainable layer whose gradient was not finite, -1 if none; then the step made no update.
        learning_rate: The step's.
        samples: Consumed since the run's start, this step included.
        own_ids: This rank's samples of this step.
        seconds: From the request for the batch to the end of the step, as the host sees it.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    stop: Tensor
    first_overflow: Tensor
    learning_rate: float
    samples: int
    own_ids: list[int]
    seconds: float


def build(job: Job, vocab_size: int, rank: int, world_size: int, device: torch.device) -> tuple[Zero3Sequential, Zero3Adam]:
    """The job's model in chunks, initialised from (seed, name), and its optimizer. No rank ever holds the whole model."""
    with torch.device("meta"):
        modules = gpt_neox(job.model, vocab_size)
    dtype = DTYPES[job.train.compute_dtype]
    train, layers, workers = job.train, [], job.workers
    group = hybrid_mesh(workers.shard_group, device, timedelta(seconds=workers.timeout_s)) if workers.shard_group else None
    for index, module in enumerate(modules):
        block = 0 < index < len(modules) - 1
        again = block and train.recompute_every > 0 and index % train.recompute_every == 0
        layers.append(
            Zero3Layer(
                module, rank, world_size, device, dtype, group=group, name=str(index), initialize=initialize, seed=job.seed, offload=train.offload, recompute=again
            )
        )
    model = Zero3Sequential(layers, average=False)
    scaler = LossScaler(device) if dtype is torch.float16 else None
    optimizer = Zero3Adam(
        model.get_trainable_chunk(),
        train.learning_rate,
        train.adam_betas,
        train.adam_eps,
        train.weight_decay,
        scaler,
        DTYPES[train.moment_dtype],
        train.average_decay,
    )
    return model, optimizer


def dtypes(job: Job) -> str:
    """The dtypes in force, for people."""
    train = job.train
    sent = train.compute_dtype if train.reduce_every == "micro_batch" else "fp32"
    return f"parameters fp32, compute {train.compute_dtype}, gradients sent in {sent} and summed in fp32, moments {train.moment_dtype}"


def steps(
    job: Job,
    model: Zero3Sequential,
    optimizer: Zero3Adam,
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    done: int,
    samples: int,
    device: torch.device,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Iterator[StepResult]:
    """Train from the step after `done` to the job's last; one result per step.

    Args:
        batches: This rank's part of each remaining step: ids (R,) and tokens (R, S+1).
        done: Steps done before.
        samples: Samples consumed before.
        asked_to_stop: Whether this rank knows of a request to stop; the ranks tell each other with the loss, at no further cost.
    """
    train = job.train
    for step in range(done + 1, train.steps + 1):
        start = time.perf_counter()
        ids, tokens = next(batches)
        inputs, labels = inputs_and_labels(ids, tokens, device)
        rate = learning_rate(step, train)
        loss, norm, stop = train_step(model, optimizer, inputs, labels, train, rate, asked_to_stop())
        samples += train.global_batch
        yield StepResult(step, loss, norm, stop, optimizer.first_overflow, rate, samples, ids[ids >= 0].tolist(), time.perf_counter() - start)
