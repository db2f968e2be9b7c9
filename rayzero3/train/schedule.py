"""The learning rate of each step: linear warm-up, then a cosine. Pure numbers."""

from __future__ import annotations

import math

from rayzero3.config import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Rate of a step, counted from 1: it reaches the peak in the last step of the warm-up and the final rate in the last step.

    Source: Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5, one period.
    """
    if step <= train.warmup:
        return train.learning_rate * step / train.warmup
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    return train.final_rate + (train.learning_rate - train.final_rate) * (1 + math.cos(math.pi * min(1.0, done))) / 2
