"""Ranks of one host read each other's memory: the bits are those of sending, nobody waits in vain, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from rayzero3.engine import neighbour
from rayzero3.engine.board import SLOTS
from rayzero3.engine.comm import Comm
from tests.engine.models import Block, assert_grads_match, compare, full_grads, language_model, mean_loss, shard, tokens
from tests.ranks import RankFailed, run_ranks


def read_is_refused(*_):
    raise PermissionError(1, "Operation not permitted")


def sending():
    """Within, ranks find that they may not read each other."""
    return mock.patch.object(neighbour, "_read_memory", read_is_refused)


def steps_of(rank, world_size, dtype, tied):
    model = shard(language_model(tied=tied), rank, world_size, dtype)
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_loss(model, tokens(step, 2 * world_size)[2 * rank : 2 * rank + 2])
        loss.backward()
        losses.append(loss.detach())
        grads = full_grads(model)
        optimizer.step()
        assert model.comm._board is None or not any(model.comm._board._slots), "between steps nothing is lent"
    return model.comm, losses, grads


def both_ways(rank, world_size, dtype, tied):
    reader, losses, grads = steps_of(rank, world_size, dtype, tied)
    with sending():
        sender, sent_losses, sent_grads = steps_of(rank, world_size, dtype, tied)
    assert (reader._board is not None) == (world_size > 1) and sender._board is None
    assert all(torch.equal(read, sent) for read, sent in zip(losses, sent_losses, strict=True))
    assert all(torch.equal(grads[name], sent_grads[name]) for name in grads) and set(grads) == set(sent_grads)
    assert reader.bytes_sent["fetch"] > 0 or world_size == 1
    assert reader.bytes_sent["reduce"] == sender.bytes_sent["reduce"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_losses_and_gradients_are_bit_for_bit_those_of_sending(world_size, dtype, tied):
    run_ranks(both_ways, world_size, dtype, tied)


class Uneven(Block):
    """A block that takes its time on some ranks and not on others."""

    def forward(self, x):
        if UNEVEN.random() < 0.3:
            time.sleep(0.02 * UNEVEN.random())
        return super().forward(x)


UNEVEN = random.Random()


def uneven_ranks(rank, world_size):
    UNEVEN.seed(rank)
    layers = language_model()
    layers[1:-1] = [Uneven(12) for _ in layers[1:-1]]
    compare(rank, world_size, layers, steps=5)


def test_a_rank_neither_frees_nor_changes_what_a_slower_one_has_still_to_read():
    run_ranks(uneven_ranks, 3)


def change_after_settle(rank, world_size):
    comm = Comm()
    comm.watch()
    assert comm._board is not None
    for count in range(3):
        full = torch.full((world_size * 8,), float(count))
        pending = comm.all_gather(full, "gather")
        if rank:
            time.sleep(0.2)
        assert torch.equal(pending.wait(), torch.full((world_size * 8,), float(count)))
        comm.settle(full)
        full.fill_(torch.nan)


def test_what_is_settled_may_be_changed():
    run_ranks(change_after_settle, 3)


def many_in_flight(rank, world_size):
    comm = Comm()
    comm.watch()
    rows, pending = [], []
    for count in range(3 * SLOTS + 5):
        rows.append(torch.full((world_size,), -1.0))
        rows[-1][rank] = 1000 * rank + count
        pending.append(comm.all_gather(rows[-1], "gather"))
        if rank == 1:
            time.sleep(0.003)
    for count, each in enumerate(pending):
        assert each.wait().tolist() == [1000 * peer + count for peer in range(world_size)]


def test_more_in_flight_than_the_board_has_slots_is_no_hang_and_no_mix_up():
    run_ranks(many_in_flight, 3)


def killed(rank, world_size):
    model = shard(language_model(), rank, world_size)
    mean_loss(model, tokens(0, 2)).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mean_loss(model, tokens(0, 2)).backward()


def test_when_a_rank_is_killed_the_others_name_it_and_the_layer_long_before_the_timeout():
    with pytest.raises(RankFailed) as failure:
        run_ranks(killed, 3)
    for text in str(failure.value).split("--- rank ")[1:]:
        assert ("died without an answer" in text) if text[0] == "1" else ("rank 1 has ended" in text and "fetch 0 failed" in text)


def silent(rank, world_size):
    model = shard(language_model(), rank, world_size)
    if rank == 1:
        with contextlib.suppress(Exception):
            model.comm.ledger.explain("0 test", RuntimeError("of a rank that does not go on"))
        return
    mean_loss(model, tokens(0, 2)).backward()


def test_a_wait_ends_with_the_groups_timeout():
    with pytest.raises(RankFailed, match="rank 1 did not answer in 2 s|rank 1 has ended"):
        run_ranks(silent, 2, timeout_s=2)


def other_layer(rank, world_size):
    model = shard(language_model(), rank, world_size)
    model.layers[1 + rank](torch.ones(2, 12))


def test_ranks_at_different_layers_are_told_which_long_before_the_timeout():
    with pytest.raises(RankFailed) as failure:
        run_ranks(other_layer, 2)
    for text in str(failure.value).split("--- rank ")[1:]:
        assert "the ranks run different layers" in text and "`fetch 1`" in text and "`fetch 2`" in text


def other_transport(rank, world_size):
    comm = Comm()
    comm.watch()
    if rank == 0:
        comm.all_gather(torch.zeros(2), "one").wait()
    else:
        comm.scatter_from_first(None, torch.zeros(2), "other")


def test_a_rank_that_waits_for_memory_and_one_that_waits_for_a_message_are_both_told():
    with pytest.raises(RankFailed) as failure:
        run_ranks(other_transport, 2)
    for text in str(failure.value).split("--- rank ")[1:]:
        assert "the ranks run different layers" in text and "`fetch one`" in text and "`scatter other`" in text


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


class Moody(Uneven):
    fail = ""

    def forward(self, x):
        if Moody.fail == "forward":
            raise ValueError("in forward")
        return Raises.apply(super().forward(x)) if Moody.fail == "backward" else super().forward(x)


def exceptions(rank, world_size):
    UNEVEN.seed(rank)
    layers = language_model(blocks=4)
    layers[3] = Moody(12)
    plain = torch.nn.Sequential(*layers)
    model = shard(layers, rank, world_size)
    batch = tokens(0, 2 * world_size)
    mine = batch[2 * rank : 2 * rank + 2]
    for where in ("forward", "backward", "backward", "forward"):
        Moody.fail = where
        with pytest.raises(ValueError, match=where):
            mean_loss(model, mine).backward()
        Moody.fail = ""
        for chunk in model.get_trainable_chunk():
            chunk.grad = None
        mean_loss(model, mine).backward()
        plain.zero_grad()
        mean_loss(plain, batch).backward()
        assert_grads_match(full_grads(model), plain)


def test_after_an_exception_in_a_layer_the_next_step_is_right():
    run_ranks(exceptions, 3)


def one_rank_may_not(rank, world_size):
    with sending() if rank == 1 else contextlib.nullcontext():
        model = compare(rank, world_size, language_model())
    assert model.comm._board is None


def one_rank_is_elsewhere(rank, world_size):
    with mock.patch.object(neighbour, "_place", lambda: rank // 2):
        model = compare(rank, world_size, language_model())
    assert model.comm._board is None


def no_such_call(rank, world_size):
    with mock.patch.object(neighbour, "_libc", None):
        model = compare(rank, world_size, language_model())
    assert model.comm._board is None


def no_shared_memory(rank, world_size):
    with mock.patch.object(os, "memfd_create", side_effect=OSError(38, "Function not implemented")):
        model = compare(rank, world_size, language_model())
    assert model.comm._board is None


@pytest.mark.parametrize("function", [one_rank_may_not, one_rank_is_elsewhere, no_such_call, no_shared_memory])
def test_where_one_rank_can_not_read_another_all_of_them_send(function):
    run_ranks(function, 3)


def refused_until_admitted(rank, world_size):
    admitted = []
    real = neighbour._read_memory

    def read(*arguments):
        return real(*arguments) if admitted else read_is_refused()

    with mock.patch.object(neighbour, "_read_memory", read), mock.patch.object(neighbour, "admit", admitted.append):
        model = compare(rank, world_size, language_model())
    assert model.comm._board is not None
    return admitted, os.getpid()


def test_permission_is_asked_for_only_where_it_is_needed_and_for_one_process_where_one_will_do():
    (first, first_pid), (second, second_pid) = run_ranks(refused_until_admitted, 2)
    assert (first, second) == ([second_pid], [first_pid])
    assert all(admitted == [neighbour.ANYBODY] for admitted, _ in run_ranks(refused_until_admitted, 3))


def board_files():
    return [name for name in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "rayzero3" in name]


def leaves_nothing(rank, world_size):
    model = shard(language_model(), rank, world_size)
    assert model.comm._board is not None and len(board_files()) == 1
    mean_loss(model, tokens(0, 2)).backward()
    del model
    gc.collect()
    while board_files():  # the ledger's thread looks up once more
        time.sleep(0.05)
    model = shard(language_model(), rank, world_size)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_board_goes_with_its_model_and_a_killed_rank_leaves_no_file_behind():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailed, match="died without an answer"):
        run_ranks(leaves_nothing, 2)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "rayzero3" in name]


def drops_what_it_lends(rank, world_size):
    comm = Comm()
    comm.watch()
    full = torch.full((world_size * 1024,), float(rank))
    pending = comm.all_gather(full, "gather")
    time.sleep(0.7 * rank)
    ranks = pending.wait().view(world_size, -1)[:, 0].tolist()
    del comm, pending, full
    [torch.full((world_size * 1024,), torch.nan) for _ in range(100)]
    return ranks


def test_a_rank_that_drops_its_model_or_ends_lets_slower_ones_read_first():
    assert run_ranks(drops_what_it_lends, 3) == [[0.0, 1.0, 2.0]] * 3
