"""Offloaded chunks train to the bit as others do, and whoever reads one gets the values of the last update."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from rayzero3.engine import LossScaler, Zero3Adam, Zero3Layer, Zero3Sequential, gathered
from tests.engine.models import full_values, language_model, mean_loss, tokens
from tests.ranks import run_ranks


def train(rank, world_size, offload, case):
    """Five steps; the norms, the weights, the moments and the count of updates."""
    return _train(rank, world_size, offload, **CASES[case])


def _train(rank, world_size, offload, dtype=torch.float32, tied=False, micro_batches=1, hold=False, clip=1.0, **options):
    """Where there is a scaler, the third step overflows."""
    modules = language_model(tied=tied)
    modules[2].up.requires_grad_(False)
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", dtype, offload=offload) for module in modules])
    scaler = LossScaler("cpu", initial=2.0**10) if dtype is torch.float16 else None
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-2, weight_decay=0.1, scaler=scaler, **options)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            batch = tokens(step * micro_batches + micro, 2 * world_size)[2 * rank : 2 * rank + 2]
            with model.hold_gradients() if hold and micro < micro_batches - 1 else nullcontext():
                loss = mean_loss(model, batch)
                (loss * scaler.scale * (torch.inf if step == 2 else 1.0) if scaler else loss).backward()
        norms.append(float(optimizer.clip(clip)) if clip else float(optimizer.global_norm()))
        optimizer.step()
    state = [optimizer.tensors(layer.trainable.chunk) for layer in model.all_layers() if layer.trainable is not None]
    return norms, full_values(model), [{kind: value.clone() for kind, value in tensors.items()} for tensors in state], optimizer.updates


CASES = {
    "plain": {},
    "no clipping": {"clip": None},
    "tied, four micro-batches": {"tied": True, "micro_batches": 4},
    "bf16, reduced once": {"dtype": torch.bfloat16, "micro_batches": 2, "hold": True},
    "fp16, an overflow": {"dtype": torch.float16},
    "average, bf16 moments": {"average_decay": 0.9, "moment_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_offloaded_chunks_train_to_the_bit_as_others_do(case, world_size):
    for here, away in zip(*(run_ranks(train, world_size, offload, case) for offload in (False, True)), strict=True):
        assert str(here[0]) == str(away[0]), "norms, of which one may be nan"
        assert here[3] == away[3] == (4 if "fp16" in case else 5)
        for name, value in here[1].items():
            assert torch.equal(value, away[1][name]), name
        for mine, theirs in zip(here[2], away[2], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[kind], theirs[kind]) for kind in mine)


def slow_host(rank, world_size):
    """Every update waits until it is let go; what reads a chunk must wait with it."""
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", offload=True) for module in language_model()])
    optimizer, go = Zero3Adam(model.get_trainable_chunk(), lr=0.1), threading.Event()
    real = optimizer._update
    optimizer._update = lambda *args: (go.wait(30), real(*args))
    before = {name: value.clone() for name, value in full_values(model).items()}
    mean_loss(model, tokens(0, 2)).backward()
    optimizer.clip()
    optimizer.step()
    assert not any(chunk.offload.update.done() for chunk in optimizer.chunks), "step returns while the host updates"
    threading.Timer(0.5, go.set).start()
    with gathered(model.layers[1]) as block:
        first = block.scale.clone()
    assert not torch.equal(first, before["1.scale"]), "a reader waits for the update"
    after = full_values(model)
    assert all(not torch.equal(after[name], before[name]) for name in ("0.weight", "3.up.weight"))


def test_a_step_returns_while_the_host_updates_and_every_reader_waits():
    run_ranks(slow_host, 2)


def failing_host(rank, world_size):
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", offload=True) for module in language_model()])
    optimizer = Zero3Adam(model.get_trainable_chunk())

    def fail(*_):
        raise MemoryError("no room for moments")

    optimizer._update = fail
    mean_loss(model, tokens(0, 2)).backward()
    optimizer.step()
    with pytest.raises(MemoryError, match="no room"):
        model(tokens(0, 2)[:, :-1])


def test_an_update_that_fails_on_the_host_is_told_where_its_chunk_is_read():
    run_ranks(failing_host, 1)
