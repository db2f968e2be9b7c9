"""Whatever a layer holds: frozen parts, unused parameters, tied weights, nothing at all, dirty memory, exceptions."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
from torch import nn

from rayzero3.engine import Zero3Layer, Zero3Sequential
from rayzero3.engine.ledger import Ledger
from rayzero3.errors import CollectiveError, StateError
from tests.engine.models import Block, assert_grads_match, compare, full_grads, full_values, language_model, mean_loss, shard, tokens
from tests.ranks import RankFailed, run_ranks


def frozen_part(rank, world_size):
    layers = language_model()
    for block in layers[1:-1]:
        block.scale.requires_grad_(False)
        block.up.weight.requires_grad_(False)
    layers[2].requires_grad_(False)
    model = compare(rank, world_size, layers)
    assert all(chunk.grad is None for layer in model.layers for flat in layer.frozen for chunk in [flat.chunk])
    assert model.layers[2].trainable is None and model.layers[2].frozen


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_frozen_parameters_have_their_own_chunk_and_no_gradient(world_size):
    run_ranks(frozen_part, world_size)


class Unused(Block):
    def __init__(self, width):
        super().__init__(width)
        self.idle = nn.Linear(width, width)


def unused_parameter(rank, world_size):
    layers = language_model()
    layers[2] = Unused(12)
    layers[0].idle = nn.Parameter(torch.ones(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(rank, world_size, layers)
    texts = [str(warning.message) for warning in caught if "no gradient" in str(warning.message)]
    assert len(texts) == 2 and any("2.idle.weight, 2.idle.bias" in text for text in texts) and any("0.idle" in text for text in texts)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_unused_parameter_reduces_as_zeros_and_is_named_once(world_size):
    run_ranks(unused_parameter, world_size)


class UnusedOnOneRank(Block):
    rank = 0

    def __init__(self, width):
        super().__init__(width)
        self.extra = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return super().forward(x) + (self.extra if self.rank == 1 else 0.0)


def unused_on_one_rank(rank, world_size):
    layers = language_model()
    layers[2] = UnusedOnOneRank(12)
    UnusedOnOneRank.rank = rank
    model = shard(layers, rank, world_size)
    batch = tokens(0, 2 * world_size)
    mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
    return full_grads(model)["2.extra"]


def test_a_parameter_unused_on_one_rank_only_is_no_hang():
    first, second = run_ranks(unused_on_one_rank, 2)
    assert torch.equal(first, second) and first.abs().sum() > 0


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.empty, self.three = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.gain * self.three.sum() + self.empty.sum()


def odd_sizes(rank, world_size):
    layers = language_model(blocks=1)
    compare(rank, world_size, [layers[0], Scalars(), nn.Tanh(), layers[1], nn.Identity(), layers[2]])


@pytest.mark.parametrize("world_size", [1, 4])
def test_parameters_of_0_1_and_3_elements_and_layers_without_any(world_size):
    run_ranks(odd_sizes, world_size)


def dirty_memory(rank, world_size):
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.isnan(torch.empty(3)).all(), "uninitialised memory must be planted with NaN for this test to mean anything"
    layers = language_model()
    layers[2] = Unused(12)
    compare(rank, world_size, layers)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_uninitialised_memory_never_counts(world_size):
    run_ranks(dirty_memory, world_size)


class Moody(Block):
    fail = False

    def forward(self, x):
        if Moody.fail:
            raise ValueError("moody")
        return super().forward(x)


def exception_in_forward(rank, world_size):
    layers = language_model()
    layers[2] = Moody(12)
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    batch = tokens(0, 2 * world_size)
    Moody.fail = True
    with pytest.raises(ValueError, match="moody"):
        mean_loss(model, batch[2 * rank : 2 * rank + 2])
    assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0
    Moody.fail = False
    mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
    mean_loss(plain, batch).backward()
    assert_grads_match(full_grads(model), plain)


def test_an_exception_in_a_forward_leaves_the_next_step_right():
    run_ranks(exception_in_forward, 2)


def twice(rank, world_size):
    torch.manual_seed(0)
    embedding, block, head = language_model(blocks=1)
    plain = nn.Sequential(*copy.deepcopy([embedding, block, head]))
    model = shard([embedding, block, head], rank, world_size)
    batch = tokens(0, 2 * world_size)
    mine = batch[2 * rank : 2 * rank + 2]

    def forward(layers, inputs):
        return layers[2](layers[1](layers[1](layers[0](inputs))))

    for rounds in range(2):
        first = forward(model.layers, mine[:, :-1]).float().square().mean()
        with torch.no_grad():
            forward(model.layers, mine[:, 1:])
        second = forward(model.layers, mine[:, 1:]).float().square().mean()
        abandoned = forward(model.layers, mine[:, 1:]).sum()
        (first + second).backward()
        (forward(plain, batch[:, :-1]).square().mean() + forward(plain, batch[:, 1:]).square().mean()).backward()
        assert_grads_match(full_grads(model), plain)
        del abandoned


def test_a_layer_called_twice_and_two_forwards_before_one_backward():
    run_ranks(twice, 2)


def other_order(rank, world_size):
    layers = language_model(blocks=2)
    model = shard(layers, rank, world_size)
    order = [1, 2] if rank == 0 else [2, 1]
    x = torch.randn(2, 12)
    for index in order:
        x = model.layers[index](x)


def test_ranks_that_disagree_on_the_order_get_an_error_that_names_both():
    with pytest.raises(RankFailed) as failure:
        run_ranks(other_order, 2, timeout_s=3)
    text = str(failure.value)
    assert "rank 0 at collective" in text and "rank 1 at collective" in text and "fetch 1" in text and "fetch 2" in text


def skips_a_layer(rank, world_size):
    """The last rank leaves out layer 2; ends when an error ends it."""
    model = shard(language_model(), rank, world_size)
    loss = mean_loss(model, tokens(0, 2))
    loss.backward()
    start = time.monotonic()
    try:
        x = model.layers[0](tokens(0, 2)[:, :-1])
        for index, layer in enumerate(model.layers[1:-1], start=1):
            if not (index == 2 and rank == world_size - 1):
                x = layer(x)
        model.layers[-1](x).sum().backward()
        model.comm.sum_rows(torch.zeros(1), "loss")
    except CollectiveError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_that_only_some_ranks_run_is_an_error_long_before_the_timeout(world_size):
    timeout_s = 60
    told = run_ranks(skips_a_layer, world_size, timeout_s=timeout_s)
    assert all(text for text, _ in told), "every rank ends with an error"
    assert max(elapsed for _, elapsed in told) < timeout_s / 3
    texts = [text for text, _ in told if "the ranks run different layers" in text]
    assert any(f"rank {world_size - 1}" in text and "`fetch 2`" in text for text in texts), told


def without_tags(rank, world_size, differ):
    """Ranks go through 3,000 entries, each at its own pace; the third rank's differ from some point on. Returns what each is told."""
    ledger, told = Ledger(rank, world_size), []
    ledger.watch(7, lambda: told.append(ledger.mismatch), tagged=False)
    deadline = time.monotonic() + 10
    for number in range(3000):
        ledger.enter("fetch", str(number if not differ or rank != 2 or number < 2900 else -number))
        time.sleep(0.001 if rank else 0.0011)
    while not told and time.monotonic() < deadline and differ:
        time.sleep(0.05)
    return told


def test_collectives_that_would_mix_up_data_in_silence_are_found_by_neighbours():
    told = run_ranks(without_tags, 4, True)
    assert [bool(texts) for texts in told] == [False, True, True, False], "ranks 1 and 2 look at 2 and 3"
    assert "as collective 2901, rank 1 launched `fetch 2900` and rank 2 launched `fetch -2900`" in told[1][0]
    assert run_ranks(without_tags, 3, False) == [[], [], []]


def test_a_ledger_that_nobody_watches_keeps_no_collective_open():
    alone = Ledger(0, 1)
    alone.watch(1, lambda: None)
    for number in range(3):
        alone.opens(alone.enter("fetch", str(number)), lambda: False)
    assert not alone.look() and not alone._open


def meta_start(rank, world_size):
    from tests.engine.models import Readout

    def initialize(name, tensor, generator):
        tensor.normal_(generator=generator)

    with torch.device("meta"):
        layers = [nn.Embedding(7, 5), Block(5), Readout(5, 7)]
        layers[2].weight = layers[0].weight
    model = Zero3Sequential([
        Zero3Layer(layer, rank, world_size, "cpu", name=str(index), initialize=initialize, seed=3) for index, layer in enumerate(layers)
    ])
    return full_values(model)


def test_initial_weights_depend_on_seed_and_name_alone():
    (one,), (two, _), (three, *_) = (run_ranks(meta_start, world_size) for world_size in (1, 2, 3))
    assert set(one) == {"0.weight", "1.scale", "1.norm.weight", "1.norm.bias", "1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"}
    for name in one:
        assert torch.equal(one[name], two[name]) and torch.equal(one[name], three[name])
    assert not torch.equal(one["1.scale"], one["1.norm.bias"])


def without_values(rank, world_size):
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
        norm = nn.BatchNorm1d(3)
    with pytest.raises(StateError, match="0.weight.*no values"):
        Zero3Layer(layer, rank, world_size, "cpu", name="0")
    with pytest.raises(StateError, match="0.running_mean.*no values"):
        Zero3Layer(norm, rank, world_size, "cpu", name="0")
    with pytest.raises(StateError, match="0.weight is not finite"):
        Zero3Layer(layer, rank, world_size, "cpu", name="0", initialize=lambda *_: None)


def test_what_has_no_values_is_refused_by_name():
    run_ranks(without_values, 1)


def wrong_state(rank, world_size):
    layer = Zero3Layer(nn.Linear(3, 3), rank, world_size, "cpu", name="front")
    layer.start_reduce()
    with pytest.raises(StateError, match="front can't become fetching; it is reducing"):
        layer.fetch_params()
    with pytest.raises(StateError, match=r"\(rank, world_size\) is \(5, 9\)"):
        Zero3Layer(nn.Linear(3, 3), 5, 9, "cpu")


def test_a_call_that_the_state_does_not_allow_is_refused():
    run_ranks(wrong_state, 1)
