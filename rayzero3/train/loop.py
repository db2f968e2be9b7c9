"""The loop: a generator of step results. It knows neither Ray nor where the batches come from, so a test can drive it step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayzero3.config import Job
from rayzero3.train.schedule import learning_rate
from rayzero3.train.step import train_step
from rayzero3.train.trainee import Trainee


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


def steps(
    job: Job,
    trainee: Trainee,
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
        rate = learning_rate(step, train)
        trainee.keys.step = step
        loss, norm, stop = train_step(trainee, ids, tokens, device, job, rate, asked_to_stop())
        samples += train.global_batch
        yield StepResult(step, loss, norm, stop, trainee.optimizer.first_overflow, rate, samples, ids[ids >= 0].tolist(), time.perf_counter() - start)
