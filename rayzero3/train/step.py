"""One step: some micro-batches in, one update out. And the validation loss, which is the same forward without the update.

Letters: R = rows (samples, rows of padding included) of one rank's part of a step, m = rows of a micro-batch, S = sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from rayzero3.config import Job
from rayzero3.models.context import Context
from rayzero3.models.loss import MASKED
from rayzero3.train.trainee import Trainee


def inputs_and_labels(ids: np.ndarray, tokens: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the model reads and what it should say, each (R, S) int64; the labels of rows of padding (id -1) and where there is no token are masked."""
    rows, padding = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(ids < 0)
    if device.type == "cuda":
        rows, padding = (tensor.pin_memory().to(device, non_blocking=True) for tensor in (rows, padding))
    labels = rows[:, 1:].masked_fill(padding[:, None] | (rows[:, 1:] < 0), MASKED)  # an assignment by mask would have the host wait for a GPU
    return rows[:, :-1].clamp(min=0), labels


def train_step(
    trainee: Trainee, ids: np.ndarray, tokens: np.ndarray, device: torch.device, job: Job, learning_rate: float, stop: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward, backward and update on one global batch, of which this rank has the samples `ids`, (R,), and their tokens, (R, S+1).

    Loss and gradient are sums over valid tokens, divided once, before backward, by the global number of valid tokens of the step: no
    mean of means, so the number of ranks and the micro-batch change nothing but rounding.

    Returns:
        The loss per valid token over all ranks, the gradient norm before clipping, and how many ranks say `stop`; each () on the device.
    """
    train, model, optimizer = job.train, trainee.model, trainee.optimizer
    inputs, labels = inputs_and_labels(ids, tokens, device)
    valid = model.comm.sum_rows((labels != MASKED).sum().view(1), "valid tokens")
    optimizer.zero_grad()
    total = torch.zeros(2, dtype=torch.float64, device=labels.device)
    total[1].fill_(stop)
    scale = (1 if optimizer.scaler is None else optimizer.scaler.scale) / valid[0]
    parts = list(zip(*(part.split(train.micro_batch) for part in (inputs, labels, torch.from_numpy(ids).to(device))), strict=True))
    with model.keep_fetched(train.keep_fetched_bytes), trainee.training():
        for index, (part, targets, samples) in enumerate(parts):
            more = index < len(parts) - 1
            trainee.keys.samples = samples
            with model.hold_gradients() if more and train.reduce_every == "step" else nullcontext():
                loss = trainee(part, Context(targets, job.loss, scale))
                (loss * scale).backward()
            total[0] += loss.detach() / valid[0]
    norm = optimizer.clip(train.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    loss, stops = model.comm.sum_rows(total, "loss and stop")
    return loss, norm, stops


@torch.no_grad()
def validation_loss(trainee: Trainee, batches: Iterable[tuple[np.ndarray, np.ndarray]], device: torch.device) -> float:
    """Mean cross-entropy in nats over all valid tokens of all ranks' batches. Every rank calls it with equally many batches."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for ids, tokens in batches:
        inputs, labels = inputs_and_labels(ids, tokens, device)
        sums[0] += trainee(inputs, Context(labels))
        sums[1] += (labels != MASKED).sum()
    total, count = trainee.model.comm.sum_rows(sums, "validation").tolist()
    return total / count
