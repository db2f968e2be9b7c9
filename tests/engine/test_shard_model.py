"""shard_model: ordinary modules, transformers' own among them, compute and learn as before."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from rayzero3.engine import shard_model
from rayzero3.errors import StateError
from tests.ranks import run_ranks


def grads(model):
    """Every trainable parameter's gradient, whole, by its name."""
    found = {}
    for layer in model.all_layers():
        if (flat := layer.trainable) is not None:
            rows = model.comm.gather_rows(flat.chunk.grad, "test").view(-1)
            found.update({layer.full_name(slot.name): rows[slot.offset : slot.end].view(slot.shape) for slot in flat.layout.slots})
    return found


def compare(model, plain, loss_of, batches, rank, world_size, bound=2e-6):
    """Two steps; the loss and each gradient against the plain module's on the joined batch."""
    mine, theirs = torch.optim.SGD(model.get_trainable_chunk(), lr=0.05), torch.optim.SGD(plain.parameters(), lr=0.05)
    for batch in batches:
        mine.zero_grad()
        theirs.zero_grad()
        size = len(batch) // world_size
        loss = loss_of(model, batch[rank * size : (rank + 1) * size])
        loss.backward()
        expected = loss_of(plain, batch)
        expected.backward()
        total = model.comm.sum_rows(loss.detach().view(1), "test")[0] / world_size
        assert abs(total - expected) <= 1e-5 * abs(expected)
        found, norm = grads(model), sum(p.grad.square().sum() for p in plain.parameters() if p.grad is not None).sqrt()
        named = dict(plain.named_parameters())
        assert set(found) == set(named)
        for name, parameter in named.items():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert (found[name] - wanted).norm() <= bound * norm, name
        assert sum(flat.allocated_bytes for layer in model.all_layers() for flat in layer.flats) == 0
        mine.step()
        theirs.step()


def llama(rank, world_size):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    )
    plain = LlamaForCausalLM(config)
    model = shard_model(copy.deepcopy(plain), ["model.layers.*"], device="cpu")

    def loss_of(part, ids):
        return part(input_ids=ids, labels=ids, use_cache=False).loss

    batches = [torch.randint(29, (4, 9), generator=torch.Generator().manual_seed(step)) for step in range(2)]
    compare(model, plain, loss_of, batches, rank, world_size)
    assert [layer.name for layer in model.all_layers()].count("model.embed_tokens") >= 1
    assert model._order._callers[0]().name == "model.embed_tokens" and model._order._callers[-1]().name == "lm_head", "the order is the forward's"
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=batches[0]).logits, plain(input_ids=batches[0]).logits, rtol=1e-4, atol=1e-5)
    assert model.config is config or model.config.vocab_size == 29


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_llama_of_transformers_with_a_tied_head(world_size):
    run_ranks(llama, world_size)


def t5(rank, world_size):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    plain = T5ForConditionalGeneration(config)
    model = shard_model(copy.deepcopy(plain), ["encoder.block.*", "decoder.block.*"], device="cpu")

    def loss_of(part, ids):
        return part(input_ids=ids, labels=ids.flip(1), use_cache=False).loss

    batches = [torch.randint(1, 31, (4, 7), generator=torch.Generator().manual_seed(step)) for step in range(2)]
    compare(model, plain, loss_of, batches, rank, world_size, bound=5e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_encoder_decoder_of_transformers(world_size):
    run_ranks(t5, world_size)


@dataclass
class Two:
    first: Tensor
    second: Tensor | None
    count: int


torch.utils._pytree.register_pytree_node(Two, lambda two: ([two.first, two.second, two.count], None), lambda leaves, _: Two(*leaves))


class Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, pair, *, scale=1.0, extra=None):
        out = torch.tanh(self.linear(pair[0])) * scale
        return Two(out, None if extra is None else out + extra["bias"], len(pair)), {"sum": out.sum(-1, keepdim=True)}


class Odd(nn.Module):
    """Tuples, dicts, a dataclass, keywords, None and integers travel; the parent owns a parameter and reads a child's."""

    def __init__(self, width=6):
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 1.5))
        self.embed = nn.Embedding(11, width)
        self.parts = nn.ModuleList(Part(width) for _ in range(3))
        self.tail = nn.ModuleDict({"norm": nn.LayerNorm(width)})

    def forward(self, ids):
        x = self.embed(ids) * self.gain
        for index, part in enumerate(self.parts):
            two, named = part((x, 3), scale=0.5 + index, extra={"bias": x} if index else None)
            x = (two.first if two.second is None else two.second) + named["sum"] / two.count
        return self.tail["norm"](x) @ self.embed.weight.T


def odd(rank, world_size):
    torch.manual_seed(0)
    plain = Odd()
    model = shard_model(copy.deepcopy(plain), ["parts.*"], device="cpu", pin=("embed.weight",))

    def loss_of(part, ids):
        return nn.functional.cross_entropy(part(ids).flatten(0, 1), ids.flatten())

    compare(model, plain, loss_of, [torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(s)) for s in range(3)], rank, world_size)
    unpinned = shard_model(Odd(), ["parts.*"], device="cpu")
    with pytest.raises(StateError, match="parameter embed.weight can't be used"):
        unpinned(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("world_size", [1, 2])
def test_odd_inputs_and_outputs_and_a_parent_that_reads_a_childs_weight(world_size):
    run_ranks(odd, world_size)


class Detour(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.order = [3, 1, 0, 2]

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.parts[index](x))
        return x


def detour(rank, world_size):
    torch.manual_seed(0)
    plain = Detour()
    model = shard_model(copy.deepcopy(plain), ["parts.*"], device="cpu")

    def loss_of(part, x):
        return part(x).square().mean()

    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    compare(model, plain, loss_of, [batch, batch], rank, world_size)
    assert [caller().name for caller in model._order._callers] == ["parts.3", "parts.1", "parts.0", "parts.2"]
    model.module.order = plain.order = [0, 1, 3]
    with pytest.warns(UserWarning, match="another order"):
        compare(model, plain, loss_of, [batch], rank, world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(batch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_order_is_learnt_in_the_first_forward_and_a_change_is_told(world_size):
    run_ranks(detour, world_size)


def wrong(rank, world_size):
    with pytest.raises(StateError, match="layers='blocks.*' matches no module; the model has embed, parts"):
        shard_model(Odd(), ["blocks.*"], device="cpu")
    with pytest.raises(StateError, match="layer parts.0 lies within layer parts"):
        shard_model(Odd(), ["parts", "parts.*"], device="cpu")


def test_names_that_match_nothing_or_overlap_are_refused():
    run_ranks(wrong, 1)
