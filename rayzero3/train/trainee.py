"""Trainee: a job's model in chunks, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from rayzero3.config import Job
from rayzero3.config.architectures import Transformers
from rayzero3.engine import LossScaler, Zero3Adam, Zero3Layer, Zero3Model, Zero3Sequential, generator_for, hybrid_mesh, shard_model
from rayzero3.errors import ConfigError
from rayzero3.models import build as families
from rayzero3.models import foreign
from rayzero3.models.context import Context
from rayzero3.models.dropout import DropoutKeys
from rayzero3.models.flops import foreign_step_flops, step_flops
from rayzero3.models.head import Layers
from rayzero3.models.lora import ADAPTER, add_lora, initialize_adapter
from rayzero3.models.start import Start, check_names
from rayzero3.models.tune import freeze
from rayzero3.models.weights import SafetensorsWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trainee:
    """What a run trains.

    Attributes:
        model: The sharded model.
        optimizer: Of its trainable chunks.
        keys: What its dropout masks depend on.
        source: Fingerprint of the files that it was started from; empty where the seed alone made it.
        flops_per_sample: FLOPs of one sample in a step.
    """

    model: Zero3Model
    optimizer: Zero3Adam
    keys: DropoutKeys
    source: str
    flops_per_sample: int

    def __call__(self, ids: Tensor, context: Context) -> Tensor:
        """Token ids (B, T) int64 to logits (B, T, V), or to the loss, () fp32, where the context has labels."""
        if isinstance(self.model, Zero3Sequential):
            return self.model(ids, context)
        return foreign.call(self.model, ids, context)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Dropout is on inside, and off again after it. What torch draws itself is a function of (seed, step, rank)."""
        comm = self.model.comm
        torch.manual_seed(generator_for(self.keys.seed, f"step {self.keys.step}, rank {comm.total_rank}").initial_seed())
        self.model.train()
        try:
            yield
        finally:
            self.keys.samples = None
            self.model.eval()


def build(job: Job, vocab_size: int, rank: int, world_size: int, device: torch.device) -> Trainee:
    """The job's model in chunks, filled from its folder or from (seed, name), and its optimizer. No rank ever holds the whole model.

    Args:
        vocab_size: Of the tokenizer; counts where the model section has none.

    Raises:
        ConfigError: nothing would train, or an adapter's target is not there.
        CheckpointError: the folder's weights are not the model's.
    """
    train, keys = job.train, DropoutKeys(job.seed)
    weights = None if job.model.init_from is None else SafetensorsWeights(job.model.init_from)
    parts, blocks = _parts(job, vocab_size, keys)
    if weights is not None:
        check_names(parts, weights)
    length = job.data.sequence_length
    foreign_model = isinstance(job.model, Transformers)
    flops = foreign_step_flops(parts[0][1], len(blocks), length) if foreign_model else step_flops([module for _, module in parts], length)
    model = _model(job, parts, list(blocks), rank, world_size, device, weights)
    optimizer = Zero3Adam(
        model.get_trainable_chunk(),
        train.learning_rate,
        train.adam_betas,
        train.adam_eps,
        train.weight_decay,
        LossScaler(device) if train.compute_dtype == "fp16" else None,
        DTYPES[train.moment_dtype],
        train.average_decay,
    )
    return Trainee(model, optimizer, keys, "" if weights is None else weights.fingerprint(), flops)


def dtypes(job: Job) -> str:
    """The dtypes in force, for people."""
    train = job.train
    sent = train.compute_dtype if train.reduce_every == "micro_batch" else "fp32"
    frozen = f", frozen ones {job.tune.frozen_dtype or train.compute_dtype}" if job.tune.lora or job.tune.parameters != "all" else ""
    return f"parameters fp32{frozen}, compute {train.compute_dtype}, gradients sent in {sent} and summed in fp32, moments {train.moment_dtype}"


def check_model(job: Job, vocab_size: int) -> list[str]:
    """What can be known of the model before a worker starts: names, shapes, targets. No memory for its parameters.

    Returns:
        What makes the run depend on the number of workers, a sentence each.

    Raises:
        As `build`.
    """
    parts, _ = _parts(job, vocab_size, DropoutKeys(job.seed))
    if isinstance(job.model, Transformers) and (rows := parts[0][1].get_input_embeddings().weight.shape[0]) < vocab_size:
        do = "Tokenize again with the tokenizer that belongs to the model."
        raise ConfigError(f"the vocabulary of {job.model.transformers}", rows, f"the tokenizer has {vocab_size} tokens", do)
    if job.model.init_from is not None:
        check_names(parts, SafetensorsWeights(job.model.init_from))
    found = foreign.dropouts(parts[0][1]) if isinstance(job.model, Transformers) else []
    return [f"the model's own dropout ({', '.join(found)}) is drawn on each worker: with another number of workers the run is another one"] if found else []


def _parts(job: Job, vocab_size: int, keys: DropoutKeys) -> tuple[Layers, dict[str, nn.Module]]:
    """The model's parts with their names, its blocks among them; adapters in place, what is frozen marked; all on the meta device."""
    if isinstance(job.model, Transformers):
        whole = foreign.causal_model(job.model.transformers)
        parts, blocks = [("", whole)], {name: whole.get_submodule(name) for name in foreign.block_names(whole)}
    else:
        parts = families.layers_of(job.model, vocab_size)
        blocks = dict(parts[1:-1])
    if job.tune.lora is not None:
        add_lora(blocks.items(), job.tune.lora, keys)
    freeze(parts, job.tune, job.train.compute_dtype)
    return parts, blocks


def _model(
    job: Job, parts: Layers, blocks: list[str], rank: int, world_size: int, device: torch.device, weights: SafetensorsWeights | None
) -> Zero3Model:
    train, workers = job.train, job.workers
    group = hybrid_mesh(workers.shard_group, device, timedelta(seconds=workers.timeout_s)) if workers.shard_group else None
    again = {name for index, name in enumerate(blocks, 1) if train.recompute_every and index % train.recompute_every == 0}
    shared: dict[str, Any] = {
        "device": device,
        "dtype": DTYPES[train.compute_dtype],
        "group": group,
        "initialize": _initialize if weights is None else Start(weights, job.seed, generator_for),
        "seed": job.seed,
        "offload": train.offload,
        "frozen_blocks": job.tune.frozen_dtype == "int8",
    }
    if isinstance(job.model, Transformers):
        return shard_model(parts[0][1], blocks, recompute=again, average=False, **shared)
    layers = [Zero3Layer(module, rank, world_size, name=name, recompute=name in again, **shared) for name, module in parts]
    return Zero3Sequential(layers, average=False)


def _initialize(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    (initialize_adapter if ADAPTER.fullmatch(name) else families.initialize)(name, tensor, generator)
