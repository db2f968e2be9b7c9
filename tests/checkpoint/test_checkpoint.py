"""Nothing is lost: bit for bit at the same N, the same values at any N, and what is not whole is never taken for a checkpoint."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch

from rayzero3.checkpoint.format import MANIFEST, Manifest, Position, folder_name, folders, newest, prune, rank_file
from rayzero3.checkpoint.load import load
from rayzero3.checkpoint.save import save
from rayzero3.errors import CheckpointError, CollectiveError
from rayzero3.train.loop import steps
from rayzero3.train.trainee import build
from tests.engine.models import full_values
from tests.jobs import VOCABULARY, random_batches, small_job
from tests.ranks import RankFailed, run_ranks

CPU = torch.device("cpu")
VARIANTS = {
    "plain": {},
    "tied": {"model": {"tie_embeddings": True}},
    "bf16": {"train": {"compute_dtype": "bf16"}},
    "fp16": {"train": {"compute_dtype": "fp16"}},
    "offloaded, averaged, bf16 moments": {"train": {"offload": True, "average_decay": 0.9, "moment_dtype": "bf16"}},
}


def moments(model, optimizer):
    """Adam's moments, whole, by name: the same gather as for values."""
    found = {}
    for layer in model.all_layers():
        if (flat := layer.trainable) is None:
            continue
        for kind in optimizer.tensors(flat.chunk):
            rows = model.comm.gather_rows(optimizer.state[flat.chunk][kind], "test").view(-1)
            found.update({f"{kind}/{layer.full_name(slot.name)}": rows[slot.offset : slot.end].clone() for slot in flat.layout.slots})
    return found


def go(rank, world_size, job, until, resume):
    """Train until a step, from the newest checkpoint if asked, and save. Returns losses, weights, moments and updates."""
    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    model, optimizer = trainee.model, trainee.optimizer
    checkpoints, position = job.run_folder / "checkpoints", Position(0, 0)
    if resume:
        position = load(*newest(checkpoints), job, model, optimizer)
    losses = []
    for result in steps(job, trainee, random_batches(job, position.step, rank, world_size), position.step, position.samples, CPU):
        losses.append(float(result.loss))
        if result.step == until:
            save(checkpoints, job, model, optimizer, Position(result.step, result.samples), 1)
            break
    return losses, full_values(model), moments(model, optimizer), optimizer.updates


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_at_the_same_size_is_bit_for_bit_the_undisturbed_run(tmp_path, variant):
    undisturbed = run_ranks(go, 2, small_job(tmp_path / "a", **VARIANTS[variant]), 10, False)[0]
    job = small_job(tmp_path / "b", **VARIANTS[variant])
    first = run_ranks(go, 2, job, 5, False)[0]
    second = run_ranks(go, 2, job, 10, True)[0]
    assert first[0] + second[0] == undisturbed[0]
    assert_same_bits(second[1], undisturbed[1])
    assert_same_bits(second[2], undisturbed[2])
    assert second[3] == undisturbed[3] == 10
    one, two = newest(tmp_path / "a/small/checkpoints")[1], newest(tmp_path / "b/small/checkpoints")[1]
    assert one.files == two.files, "the files' hashes are equal too"


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (4, 3)])
def test_resume_at_another_size_continues_the_same_losses(tmp_path, sizes):
    undisturbed = run_ranks(go, 1, small_job(tmp_path / "a"), 10, False)[0][0]
    job = small_job(tmp_path / "b")
    losses = run_ranks(go, sizes[0], job, 5, False)[0][0] + run_ranks(go, sizes[1], job, 10, True)[0][0]
    assert len(losses) == 10
    assert losses == pytest.approx(undisturbed, rel=1e-5)


def read(rank, world_size, job, write):
    """Load the newest checkpoint and save it again at this size; returns its content."""
    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    model, optimizer = trainee.model, trainee.optimizer
    position = load(*newest(job.run_folder / "checkpoints"), job, model, optimizer)
    if write:
        save(job.run_folder / "checkpoints", job, model, optimizer, Position(position.step + 1, position.samples), 1)
    return None, full_values(model), moments(model, optimizer), optimizer.updates


def test_four_ranks_write_three_read_and_write_five_read_the_same_bits(tmp_path):
    job = small_job(tmp_path)
    written = run_ranks(go, 4, job, 3, False)[0]
    third = run_ranks(read, 3, job, True)[0]
    fifth = run_ranks(read, 5, job, False)[0]
    for other in (third, fifth):
        assert_same_bits(written[1], other[1])
        assert_same_bits(written[2], other[2])
        assert other[3] == 3


def with_pickle_forbidden(rank, world_size, job):
    def forbidden(*_, **__):
        raise AssertionError("pickle")

    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    model, optimizer = trainee.model, trainee.optimizer
    pickle.load = pickle.loads = pickle.Unpickler = torch.load = forbidden
    return load(*newest(job.run_folder / "checkpoints"), job, model, optimizer).step


def test_no_pickle_is_read_and_the_manifest_is_plain_json(tmp_path):
    job = small_job(tmp_path)
    run_ranks(go, 2, job, 2, False)
    assert run_ranks(with_pickle_forbidden, 1, job) == [2]
    folder = newest(job.run_folder / "checkpoints")[0]
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert json.loads((folder / MANIFEST).read_text())["samples"] == 14


def spoil_nothing(folder):
    pass


def cut_file(folder):
    os.truncate(folder / rank_file(1), 100)


def lose_file(folder):
    (folder / rank_file(0)).unlink()


def lose_manifest(folder):
    (folder / MANIFEST).unlink()


def cut_manifest(folder):
    os.truncate(folder / MANIFEST, 200)


def empty_manifest(folder):
    (folder / MANIFEST).write_text("{}")


@pytest.mark.parametrize("spoil", [spoil_nothing, cut_file, lose_file, lose_manifest, cut_manifest, empty_manifest])
def test_what_is_not_whole_is_passed_over_for_the_one_before(tmp_path, spoil):
    job = small_job(tmp_path)
    run_ranks(go, 2, job, 3, False)
    run_ranks(go, 2, job, 6, True)
    checkpoints = job.run_folder / "checkpoints"
    spoil(checkpoints / folder_name(6, 1))
    assert newest(checkpoints)[1].step == (6 if spoil is spoil_nothing else 3)


def test_a_flipped_bit_is_found_and_named(tmp_path):
    job = small_job(tmp_path)
    run_ranks(go, 2, job, 3, False)
    path = job.run_folder / "checkpoints" / folder_name(3, 1) / rank_file(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RankFailed, match="rank-00001.safetensors is damaged"):
        run_ranks(read, 1, job, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "seed: 0 -> 5"),
        ({"train": {"global_batch": 9, "learning_rate": 1e-3}}, r"train.global_batch: 7 -> 9; train.learning_rate: 0.01 -> 0.001"),
        ({"model": {"layers": 3}}, "model.layers: 2 -> 3"),
        ({"train": {"steps": 99, "micro_batch": 5}, "workers": {"count": 4}}, None),
    ],
)
def test_a_changed_job_is_refused_with_the_difference_unless_it_may_change(tmp_path, changes, message):
    run_ranks(go, 1, small_job(tmp_path), 1, False)
    changed = small_job(tmp_path, **changes)
    if message is None:
        run_ranks(read, 1, changed, False)
    else:
        with pytest.raises(RankFailed, match=message):
            run_ranks(read, 1, changed, False)


def one_rank_stays_away(rank, world_size, job):
    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    model, optimizer = trainee.model, trainee.optimizer
    for chunk in optimizer.chunks:
        optimizer.empty_state(chunk, 0)
    if rank == 1:
        return None
    with pytest.raises(CollectiveError, match="nothing heard of rank 1"):
        save(job.run_folder / "checkpoints", job, model, optimizer, Position(1, 7), 1)
    return newest(job.run_folder / "checkpoints")


def test_a_rank_that_never_saves_is_named_and_nothing_is_committed(tmp_path):
    assert run_ranks(one_rank_stays_away, 2, small_job(tmp_path), timeout_s=3) == [None, None]


def one_rank_cannot_write(rank, world_size, job):
    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    model, optimizer = trainee.model, trainee.optimizer
    for chunk in optimizer.chunks:
        optimizer.empty_state(chunk, 0)
    checkpoints = job.run_folder / "checkpoints"
    if rank == 1:
        (checkpoints / folder_name(1, 1) / rank_file(1)).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="not written by rank 1"):
        save(checkpoints, job, model, optimizer, Position(1, 7), 1)
    return newest(checkpoints)


def test_a_rank_that_cannot_write_is_named_on_every_rank(tmp_path):
    assert run_ranks(one_rank_cannot_write, 2, small_job(tmp_path)) == [None, None]


def test_pruning_keeps_the_newest_whole_ones_and_the_unfinished_one_of_this_attempt(tmp_path):
    def make(step, attempt, whole):
        folder = tmp_path / folder_name(step, attempt)
        folder.mkdir()
        if whole:
            Manifest(step, attempt, step, step, {}, {}, {}).write(folder)

    for step in (1, 2, 3, 4):
        make(step, 1, True)
    make(5, 1, False)
    make(5, 2, False)
    prune(tmp_path, 2, 2)
    assert [folder.name for folder in folders(tmp_path)] == [folder_name(3, 1), folder_name(4, 1), folder_name(5, 2)]
