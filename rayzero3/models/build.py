"""A model of a section: its layers, and how their parameters are initialised."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero3.config import Architecture, GptNeox
from rayzero3.models.gpt_neox import gpt_neox
from rayzero3.models.head import Layers
from rayzero3.models.llama import llama

INIT_STD = 0.02


def layers_of(section: Architecture, vocab_size: int) -> Layers:
    """The model's layers with the names of their Hugging Face file, on the meta device. vocab_size counts where the section has none."""
    with torch.device("meta"):
        return (gpt_neox if isinstance(section, GptNeox) else llama)(section, section.vocab_size or vocab_size)


def initialize(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill one parameter in place: norms with ones, biases with zeros, matrices from a normal distribution of deviation 0.02."""
    if name.endswith("bias"):
        tensor.zero_()
    elif "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, INIT_STD, generator=generator)
