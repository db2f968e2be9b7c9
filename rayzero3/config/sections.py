"""The sections of a job file but the model's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from rayzero3.config.values import Count, CountOrZero, Duration, Section, Size


class DataSection(Section):
    """The token shards that `rayzero3 tokenize` wrote, and how they are cut into samples."""

    path: Path = Field(description="folder of token shards, readable on every node")
    sequence_length: Count = Field(512, description="tokens a sample predicts; it reads one more")


class LoraSection(Section):
    """Low-rank adapters beside frozen linear layers. Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4."""

    rank: Count = Field(8, description="inner size of an adapter")
    alpha: float = Field(16.0, gt=0, description="an adapter's output counts alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="part of an adapter's inputs that is zeroed in training; a mask by (seed, name, step, sample)")
    targets: tuple[str, ...] | None = Field(None, description="last names of the linear layers that get one; derived: every linear layer of the blocks")


class TuneSection(Section):
    """Which parameters train. What is frozen costs no gradient and no optimizer memory."""

    parameters: str = Field("all", description="all, biases, or a regular expression that the names of trainable parameters match in full")
    lora: LoraSection | None = Field(None, description="train adapters alone: rank, alpha, dropout, targets")
    frozen_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = Field(
        None, description="what is frozen is kept so and travels so; int8: blocks with a scale each; derived: the compute dtype"
    )

    def faults(self) -> list[str]:
        """What is wrong with the values together, a sentence each."""
        try:
            re.compile(self.parameters)
        except re.error as error:
            return [f"tune.parameters is {self.parameters!r}; it is no regular expression: {error}. Mend it, or write all or biases."]
        if self.lora is not None and self.parameters != "all":
            return [f"tune.parameters is {self.parameters!r}; with tune.lora the adapters train and nothing else. Leave one of them out."]
        return []


class LossSection(Section):
    """What is minimised beside the cross-entropy. The validation loss is the plain cross-entropy always."""

    z_loss: float = Field(0.0, ge=0, description="weight of the squared log of the softmax's denominator, which keeps logits small")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="part of each label that is spread over the vocabulary")


class TrainSection(Section):
    """The steps: how many, how large, how fast."""

    steps: Count = Field(1000, description="steps of the run, counted from 1")
    global_batch: Count = Field(32, description="samples per step over all workers; any number is legal for any number of workers")
    micro_batch: Count = Field(8, description="samples per forward on one worker; bounds the activations, never changes the result")
    learning_rate: float = Field(6e-4, gt=0, description="peak of the schedule")
    final_learning_rate: float | None = Field(None, ge=0, description="end of the cosine; derived: a tenth of the peak")
    warmup_steps: CountOrZero | None = Field(None, description="linear warm-up; derived: a twentieth of the steps")
    weight_decay: float = Field(0.0, ge=0, description="decoupled, as in AdamW; spares norms and biases")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="decay of Adam's two moments")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    clip_norm: float | None = Field(None, gt=0, description="bound of the global gradient norm; none unless given")
    compute_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="dtype of the fetched parameters and activations; chunks stay fp32; fp16 scales the loss"
    )
    reduce_every: Literal["micro_batch", "step"] = Field(
        "micro_batch", description="micro_batch: least memory; step: least traffic, for 4 bytes per trainable parameter on every worker"
    )
    recompute_every: CountOrZero = Field(0, description="every so many blocks keep only their inputs for backward and run again there; 0: none")
    offload: bool = Field(False, description="fp32 chunks and Adam's state stay in host memory and are updated there: for models that fill the GPUs")
    moment_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of Adam's two moments between steps; bf16 takes half the memory")
    average_decay: float | None = Field(
        None, gt=0, lt=1, description="keep an exponential moving average of the weights, 4 more bytes per parameter over N, and validate it too"
    )
    keep_fetched_bytes: Size = Field(
        0, description="memory for layers that stay whole over the micro-batches of a step (512MiB, 2GiB): less traffic"
    )

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 20 if self.warmup_steps is None else self.warmup_steps

    @property
    def final_rate(self) -> float:
        """Learning rate at the last step."""
        return self.learning_rate / 10 if self.final_learning_rate is None else self.final_learning_rate


class ValidationSection(Section):
    """The loss on the validation split."""

    every_steps: Count = Field(100, description="steps between two validations; one more after the last step")
    samples: Count | Literal["all"] = Field(256, description="samples at most, always the same ones; or all")
    prompts: tuple[str, ...] = Field((), description="texts that the model continues at every validation, the likeliest token each time")
    prompt_tokens: Count = Field(32, description="tokens that it adds at most")


class WorkersSection(Section):
    """The processes that train: one per GPU, or CPU processes with gloo."""

    count: Count = Field(1, description="number of workers N")
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: gpu where the cluster has one, else cpu")
    shard_group: Count | None = Field(
        None, description="neighbours that share one copy of the model, such as the GPUs of a node; derived: all; full sharding where it does not divide count"
    )
    timeout_s: Duration = Field(60.0, description="a collective that takes longer has failed (60, 90s, 2m)")
    max_restarts: CountOrZero = Field(3, description="restarts from the last checkpoint before the job fails")


class CheckpointSection(Section):
    """When the run is saved."""

    every_steps: Count = Field(100, description="steps between two checkpoints; one more after the last step")
    keep: Count = Field(3, description="newest whole checkpoints that are kept")
