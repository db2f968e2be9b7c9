"""Properties that hold for any shapes, any mix of layers and any N; the examples are drawn, the same ones in every run."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential
from rayzero3.engine.layout import CHUNK_ALIGNMENT, SLOT_ALIGNMENT, FlatLayout
from rayzero3.engine.state import LayerState
from tests.engine.models import full_grads, full_values
from tests.ranks import run_ranks

EXAMPLES = {1: 60, 2: 60, 3: 20, 4: 20}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
fixed = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink]
)

SIZES = st.one_of(st.sampled_from([0, 1, 31, 32, 33]), st.integers(2, 300))
SHAPES = st.one_of(st.lists(SIZES, max_size=3).map(tuple), st.integers(1, 2**31).map(lambda size: (size,)))
LAYOUTS = st.builds(
    FlatLayout.of, st.lists(SHAPES, max_size=6).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)}), st.integers(1, 1024)
)


@settings(fixed, max_examples=200)
@given(LAYOUTS)
def test_slots_are_aligned_in_order_and_never_overlap(layout):
    end = 0
    for slot in layout.slots:
        assert slot.offset % SLOT_ALIGNMENT == 0
        assert end <= slot.offset < end + SLOT_ALIGNMENT
        assert slot.end - slot.offset == slot.numel == prod(slot.shape)
        end = slot.end
    assert layout.numel == sum(slot.numel for slot in layout.slots)
    assert end <= layout.padded_numel < end + CHUNK_ALIGNMENT * layout.world_size
    assert layout.chunk_numel * layout.world_size == layout.padded_numel
    assert layout.chunk_numel % CHUNK_ALIGNMENT == 0


@settings(fixed, max_examples=100)
@given(LAYOUTS)
def test_the_ranks_hold_each_element_of_each_parameter_once(layout):
    offsets = {slot.name: slot.offset for slot in layout.slots}
    reached = dict.fromkeys(offsets, 0)
    for rank in range(layout.world_size):
        first, last = layout.rank_range(rank)
        assert last - first == layout.chunk_numel
        for part in layout.overlaps(rank):
            assert part.start == reached[part.name] < part.stop
            assert first + part.at == offsets[part.name] + part.start
            assert 0 <= part.at and part.at + part.stop - part.start <= layout.chunk_numel
            reached[part.name] = part.stop
    assert reached == {slot.name: slot.numel for slot in layout.slots}


@settings(fixed, max_examples=200)
@given(LAYOUTS)
def test_gaps_and_slots_partition_the_padded_range(layout):
    pieces = sorted(layout.gaps() + [(slot.offset, slot.end) for slot in layout.slots if slot.numel])
    assert all(start < stop for start, stop in pieces)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces)][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == layout.padded_numel


@dataclass(frozen=True)
class Part:
    """One layer to draw: a matrix, and other parameters that are added to what it gives, or are not used."""

    width: int
    trainable: bool
    dtype: torch.dtype
    others: list[tuple[tuple[int, ...], bool, torch.dtype, bool]]
    recompute: bool


@dataclass(frozen=True)
class Case:
    """A stack of layers and how it is used."""

    parts: list[Part]
    width: int
    tied: bool
    compute: torch.dtype
    samples: int
    held: tuple[bool, ...]  # for each micro-batch, whether its gradients wait for the next one's
    input_grad: bool
    prefetch: int
    decay: float
    max_norm: float | None


MOSTLY = st.sampled_from([True, True, True, False])
OTHERS = st.tuples(st.sampled_from([(), (0,), (1,), (3,), (2, 0, 3), (5, 7)]), MOSTLY, st.sampled_from(DTYPES), MOSTLY)
PARTS = st.builds(Part, st.integers(1, 9), MOSTLY, st.sampled_from(DTYPES), st.lists(OTHERS, max_size=3), st.booleans())
CASES = st.builds(
    Case,
    parts=st.lists(PARTS, min_size=1, max_size=5),
    width=st.integers(1, 9),
    tied=st.booleans(),
    compute=st.sampled_from([torch.float32, torch.bfloat16]),
    samples=st.integers(1, 3),
    held=st.sampled_from([(False,), (False, False), (True, False)]),
    input_grad=st.booleans(),
    prefetch=st.integers(0, 3),
    decay=st.sampled_from([0.0, 0.3]),
    max_norm=st.sampled_from([None, 1e-3, 1e3]),
)


class Drawn(nn.Module):
    """The module that a Part describes."""

    def __init__(self, inputs: int, part: Part, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(outputs, inputs) / inputs**0.5).to(part.dtype), requires_grad=part.trainable)
        self.others = nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype), requires_grad=grad) for shape, grad, dtype, _ in part.others)
        self.used = [used for *_, used in part.others]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight.T)
        for other, used in zip(self.others, self.used, strict=True):
            y = y + other.sum() / 8 if used else y
        return y


def modules_of(case: Case) -> list[Drawn]:
    torch.manual_seed(0)
    widths = [case.width, *(case.width if case.tied else part.width for part in case.parts)]
    modules = [Drawn(widths[i], part, widths[i + 1]) for i, part in enumerate(case.parts)]
    if case.tied:
        modules[-1].weight = modules[0].weight
    return modules


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 0.5).square().mean()


def batch(case: Case, rank: int, index: int) -> Tensor:
    x = torch.randn(case.samples, case.width, generator=torch.Generator().manual_seed(100 * index + rank))
    return x.to(case.compute).requires_grad_(case.input_grad)


def agrees_with_plain(case: Case, rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    """Gradients, then one step of Adam.

    The gradients are the mean over the ranks of what a plain module in the compute dtype has on each rank's samples, to 1e-6 of its norm
    there. In bf16 too: the engine adds no rounding of its own, for it sums in fp32.
    """
    modules = modules_of(case)
    start = {name: parameter.detach().float().clone() for name, parameter in nn.Sequential(*modules).named_parameters()}
    plain = nn.Sequential(*copy.deepcopy(modules)).to(case.compute)
    if rank:
        for module in modules:
            for parameter in module.parameters():
                parameter.data.fill_(torch.nan)
    model = Zero3Sequential(
        [Zero3Layer(m, rank, world_size, "cpu", case.compute, group=group, recompute=p.recompute) for m, p in zip(modules, case.parts, strict=True)],
        prefetch=case.prefetch,
    )
    trainable = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    expected = {name: torch.zeros_like(start[name]) for name in trainable}
    norms = dict.fromkeys((name.split(".")[0] for name in trainable), 0.0)
    with torch.no_grad():
        assert (loss_of(model, batch(case, 0, 0)) - loss_of(plain, batch(case, 0, 0))).abs() <= 1e-6
    assert_nothing_is_whole(model)
    for index, hold in enumerate(case.held):
        for part in range(world_size):
            plain.zero_grad()
            theirs = batch(case, part, index)
            wanted = loss_of(plain, theirs)
            if wanted.requires_grad:
                wanted.backward()
            grads = {name: plain.get_parameter(name).grad.float() for name in trainable if plain.get_parameter(name).grad is not None}
            for name, grad in grads.items():
                expected[name] += grad / world_size
            for layer in norms:
                norms[layer] += sum(float(grad.square().sum()) for name, grad in grads.items() if name.split(".")[0] == layer) ** 0.5 / world_size
            if part == rank:
                mine = batch(case, rank, index)
                backward(model, loss := loss_of(model, mine), hold)
                assert (loss - wanted).abs() <= 1e-6 * wanted
                if case.input_grad:
                    assert (mine.grad - theirs.grad).norm() <= 1e-6 * theirs.grad.norm()
    assert_nothing_is_whole(model)
    if not wanted.requires_grad:
        return
    found = full_grads(model)
    assert set(found) == set(trainable)
    for layer, norm in norms.items():
        error = sum(float((found[name] - expected[name]).square().sum()) for name in trainable if name.split(".")[0] == layer) ** 0.5
        assert error <= 1e-6 * norm, f"layer {layer}: {error:.2e} of {norm:.2e}"
    if trainable:
        adam_is_torchs(case, model, start, found)


def assert_nothing_is_whole(model: Zero3Sequential) -> None:
    assert {layer.state for layer in model.all_layers()} == {LayerState.CHUNKED}
    assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0


def backward(model: Zero3Sequential, loss: Tensor, hold: bool) -> None:
    if loss.requires_grad and hold:
        with model.hold_gradients():
            loss.backward()
    elif loss.requires_grad:
        loss.backward()


def adam_is_torchs(case: Case, model: Zero3Sequential, start: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """From equal gradients, so that none of Adam's amplified rounding, where a gradient is 0, is in the way."""
    values = {name: nn.Parameter(start[name].clone()) for name in grads}
    matrices = [value for value in values.values() if value.dim() >= 2]
    others = [value for value in values.values() if value.dim() < 2]
    groups = [{"params": params, "weight_decay": decay} for params, decay in ((matrices, case.decay), (others, 0.0)) if params]
    theirs, mine = torch.optim.AdamW(groups, lr=1e-2), Zero3Adam(model.get_trainable_chunk(), lr=1e-2, weight_decay=case.decay)
    norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
    scale = 1.0 if case.max_norm is None or norm <= case.max_norm else case.max_norm / norm
    for name, value in values.items():
        value.grad = grads[name] * scale
    assert float(mine.clip(case.max_norm)) == pytest.approx(norm, rel=1e-6)
    mine.step()
    theirs.step()
    after = full_values(model)
    assert set(after) == set(start)
    for name, before in start.items():
        expected = values[name].data if name in values else before
        assert torch.allclose(after[name].float(), expected, rtol=1e-6, atol=1e-6), name


class OutOfStep(BaseException):
    """A collective failed: these ranks can try no further example."""


def on_every_example(rank: int, world_size: int, examples: int) -> None:
    """Every rank draws the same examples. One that fails is shrunk by all ranks; its smallest form ends the traceback."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    tried = 0

    @settings(fixed, max_examples=examples)
    @given(CASES)
    def try_one(case):
        nonlocal tried
        tried += 1
        error = None
        try:
            agrees_with_plain(case, rank, world_size, group)
        except Exception as raised:  # whatever it is, the other ranks must hear of it
            error = raised
        verdicts = [None] * world_size
        dist.all_gather_object(verdicts, (repr(case), error and f"{type(error).__name__}: {error}"))
        assert {drawn for drawn, _ in verdicts} == {repr(case)}, "the ranks drew different examples"
        failures = [f"rank {peer}: {text}" for peer, (_, text) in enumerate(verdicts) if text]
        if any("CollectiveError" in text for text in failures):
            raise OutOfStep("\n".join([repr(case), *failures])) from error
        if failures:
            raise AssertionError("\n".join(failures)) from error

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no gradient in this backward")
        try_one()
    assert tried >= examples // 2, "hardly anything was drawn"


@pytest.mark.parametrize("world_size", EXAMPLES)
def test_any_stack_of_layers_has_the_gradients_and_the_update_of_a_plain_module(world_size):
    run_ranks(on_every_example, world_size, EXAMPLES[world_size], timeout_s=120)
