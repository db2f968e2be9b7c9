"""Small modules for the engine's tests, and the bookkeeping that compares them with plain ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rayzero3.engine import Zero3Layer, Zero3Sequential
from rayzero3.engine.state import LayerState


class Block(nn.Module):
    """Residual feed-forward; `scale` is used before anything trainable."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Readout(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def language_model(width: int = 12, vocabulary: int = 13, blocks: int = 3, tied: bool = False) -> list[nn.Module]:
    """Embedding, blocks, readout, from seed 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(vocabulary, width), *(Block(width) for _ in range(blocks)), Readout(width, vocabulary)]
    if tied:
        layers[-1].weight = layers[0].weight
    return layers


def tokens(step: int, samples: int, length: int = 5, vocabulary: int = 13) -> Tensor:
    """(samples, length + 1) int64, a function of the step."""
    return torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(step))


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def shard(layers: list[nn.Module], rank: int, world_size: int, dtype: torch.dtype = torch.float32, **kwargs) -> Zero3Sequential:
    """The layers as the seed wraps them, from a copy; ranks other than 0 start from spoilt values, which must not count."""
    layers = copy.deepcopy(layers)
    if rank:
        with torch.no_grad():
            for parameter in nn.ModuleList(layers).parameters():
                parameter.fill_(torch.nan)
    return Zero3Sequential([Zero3Layer(module=layer, rank=rank, world_size=world_size, device="cpu", dtype=dtype) for layer in layers], **kwargs)


def full_values(model: Zero3Sequential) -> dict[str, Tensor]:
    """Every parameter, whole, by its name in nn.Sequential."""
    found = {}
    for layer in model.all_layers():
        for flat in layer.flats:
            found.update({layer.full_name(name): value for name, value in flat.gather_values("test").items()})
    return found


def full_grads(model: Zero3Sequential) -> dict[str, Tensor]:
    """Every trainable parameter's gradient, whole."""
    found = {}
    for layer in model.all_layers():
        if (flat := layer.trainable) is not None:
            rows = model.comm.gather_rows(flat.chunk.grad.to(flat.device), "test").view(-1)
            for start, stop in flat.layout.gaps():
                assert not rows[start:stop].any(), "padding must stay zero"
            found.update({layer.full_name(slot.name): rows[slot.offset : slot.end].view(slot.shape) for slot in flat.layout.slots})
    return found


def assert_grads_match(mine: dict[str, Tensor], plain: nn.Module, bound: float = 1e-6) -> None:
    """Each layer's gradient equals the plain module's to `bound` of its norm."""
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert set(mine) == set(theirs)
    for index in {name.split(".")[0] for name in theirs}:
        names = [name for name in theirs if name.split(".")[0] == index]
        error = sum((mine[name] - theirs[name]).square().sum() for name in names).sqrt()
        norm = sum(theirs[name].square().sum() for name in names).sqrt()
        assert error <= bound * norm, f"layer {index}: {error / norm:.2e} of its norm"


def compare(rank, world_size, layers, steps=3):
    """Some steps of SGD against the plain module on the joined batch; gradients and weights are checked."""
    plain = nn.Sequential(*copy.deepcopy(layers))
    model = shard(layers, rank, world_size)
    mine = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
    theirs = torch.optim.SGD([parameter for parameter in plain.parameters() if parameter.requires_grad], lr=0.1)
    for step in range(steps):
        batch = tokens(step, 2 * world_size)
        mine.zero_grad()
        theirs.zero_grad(set_to_none=False)
        mean_loss(model, batch[2 * rank : 2 * rank + 2]).backward()
        mean_loss(plain, batch).backward()
        for parameter in plain.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        assert_grads_match(full_grads(model), plain)
        assert {layer.state for layer in model.all_layers()} == {LayerState.CHUNKED}
        assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0
        mine.step()
        theirs.step()
    values = full_values(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.data, rtol=1e-6, atol=1e-6)
    return model
