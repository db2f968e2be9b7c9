"""Pair: a model of ours and transformers' model of the same shape with the same weights, each behind a function that computes loss and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from rayzero3.config import GptNeox, Llama
from rayzero3.models.build import layers_of
from rayzero3.models.context import Context


@dataclass(frozen=True)
class Shape:
    """What both models are.

    Attributes:
        family: gpt_neox or llama.
        layers, width, heads, groups, vocab_size: Of the model; groups, the key/value heads, of Llama alone.
        batch, length: Samples of a step, and their tokens.
    """

    family: str
    layers: int = 8
    width: int = 512
    heads: int = 8
    groups: int = 4
    vocab_size: int = 8192
    batch: int = 2
    length: int = 256


SHAPES = {
    "gpt_neox": Shape("gpt_neox"),
    "llama": Shape("llama"),
    "gpt_neox-64k": Shape("gpt_neox", layers=4, vocab_size=65536),
    "llama-64k": Shape("llama", layers=4, vocab_size=65536),
}


class Pair:
    """Ours and theirs, in fp32 on the CPU.

    Attributes:
        steps: "ours" and "transformers" -> a step, forward and backward; returns the loss, summed over the tokens, in nats.
    """

    def __init__(self, shape: Shape) -> None:
        theirs, section = _theirs(shape)
        named = layers_of(section, shape.vocab_size)
        self._theirs, self._layers = theirs, nn.ModuleList(layer for _, layer in named).to_empty(device="cpu")
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for prefix, layer in named:
            for name, mine in layer.named_parameters():
                full = f"{prefix}.{name}" if prefix else name
                self._pairs.append((mine, _parameter(theirs, full)))
        for mine, other in self._pairs:
            mine.data.copy_(other.data)
        if len(self._pairs) != len(list(theirs.parameters())):
            raise AssertionError("the two models have not the same parameters")
        tokens = torch.randint(shape.vocab_size, (shape.batch, shape.length + 1), generator=torch.Generator().manual_seed(1))
        self._ids, self._labels = tokens[:, :-1], tokens[:, 1:].contiguous()
        self.steps: dict[str, Callable[[], Tensor]] = {"ours": self._step_ours, "transformers": self._step_theirs}

    def time(self, side: str) -> tuple[float, float, float]:
        """One step: CPU seconds of this process, wall seconds, and the loss."""
        for pair in self._pairs:
            pair[side != "ours"].grad = None
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self.steps[side]()
        return time.process_time() - cpu, time.perf_counter() - wall, loss.item()

    def gradient_error(self) -> float:
        """After a step of each: the largest norm of a difference between a parameter's gradients, over the gradient's norm."""
        norms = [((mine.grad - other.grad).norm(), other.grad.norm(), other.grad.numel()) for mine, other in self._pairs]
        largest = max(norm / numel**0.5 for _, norm, numel in norms)
        # a gradient that is zero but for rounding, as a key's bias is, counts by the size of the others
        return max((difference / max(norm, 1e-3 * largest * numel**0.5)).item() for difference, norm, numel in norms)

    def _step_ours(self) -> Tensor:
        context, x = Context(labels=self._labels), self._ids
        for layer in self._layers:
            x = layer(x, context)
        x.backward()
        return x

    def _step_theirs(self) -> Tensor:
        logits = self._theirs(self._ids, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), self._labels.flatten(), reduction="sum")
        loss.backward()
        return loss


def _theirs(shape: Shape) -> tuple[nn.Module, GptNeox | Llama]:
    common = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    if shape.family == "gpt_neox":
        section = GptNeox(layers=shape.layers, width=shape.width, heads=shape.heads)
        config = transformers.GPTNeoXConfig(intermediate_size=section.mlp, **common)
        return transformers.GPTNeoXForCausalLM(config).train(), section
    section = Llama(layers=shape.layers, width=shape.width, heads=shape.heads, key_value_heads=shape.groups)
    config = transformers.LlamaConfig(intermediate_size=section.mlp, num_key_value_heads=shape.groups, rms_norm_eps=section.norm_eps, **common)
    return transformers.LlamaForCausalLM(config).train(), section


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    """By the name in the file, which an older transformers gives the readout of GPT-NeoX in the model too."""
    return model.get_parameter(name if hasattr(model, "embed_out") else name.replace("embed_out", "lm_head"))
