"""GPT-NeoX computes what transformers' GPTNeoXForCausalLM computes from the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from rayzero3.config import ModelSection
from rayzero3.models.gpt_neox import gpt_neox, initialize

VOCABULARY = 37
SECTIONS = [
    ModelSection(layers=3, width=32, heads=4),
    ModelSection(layers=2, width=48, heads=4, rotary_fraction=0.5, rotary_base=500.0),
    ModelSection(layers=2, width=32, heads=2, rotary_fraction=1.0, parallel_residual=False, mlp_width=80),
    ModelSection(layers=2, width=32, heads=4, tie_embeddings=True, layer_norm_eps=1e-3),
]


def reference_name(name: str, layers: int) -> str:
    position, rest = name.split(".", 1)
    if position == "0":
        return f"gpt_neox.embed_in.{rest}"
    if int(position) <= layers:
        return f"gpt_neox.layers.{int(position) - 1}.{rest}"
    return f"gpt_neox.{rest}" if rest.startswith("final_layer_norm") else f"lm_head.{rest}"


def pair(section: ModelSection) -> tuple[nn.Sequential, GPTNeoXForCausalLM, dict[str, str]]:
    reference = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=section.width,
            num_hidden_layers=section.layers,
            num_attention_heads=section.heads,
            intermediate_size=section.mlp,
            rope_parameters={"rope_type": "default", "rope_theta": section.rotary_base, "partial_rotary_factor": section.rotary_fraction},
            layer_norm_eps=section.layer_norm_eps,
            use_parallel_residual=section.parallel_residual,
            tie_word_embeddings=section.tie_embeddings,
            max_position_embeddings=64,
        )
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0.0, 0.2)
    model = nn.Sequential(*gpt_neox(section, VOCABULARY))
    names = {name: reference_name(name, section.layers) for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reference.get_parameter(names[name]))
    assert sorted(names.values()) == sorted(name for name, _ in reference.named_parameters())
    return model, reference, names


@pytest.mark.parametrize("section", SECTIONS)
def test_logits_and_gradients_equal_the_reference(section):
    model, reference, names = pair(section)
    ids = torch.randint(VOCABULARY, (3, 19), generator=torch.Generator().manual_seed(2))
    mine, theirs = model(ids), reference(ids).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3))
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(names[name]).grad
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name


def test_the_rotary_table_is_fp32_under_bf16():
    section = SECTIONS[0]
    rotary = gpt_neox(section, VOCABULARY)[1].attention.rotary
    query = torch.randn(1, 4, 9, 8).bfloat16()
    rotated, _ = rotary(query, query)
    exact, _ = rotary(query.float(), query.float())
    assert rotated.dtype is torch.bfloat16 and torch.equal(rotated, exact.bfloat16())


def test_initialisation_has_a_rule_for_every_parameter():
    for name, parameter in nn.Sequential(*gpt_neox(SECTIONS[0], VOCABULARY)).named_parameters():
        filled = torch.full(parameter.shape, torch.nan)
        initialize(name, filled, torch.Generator().manual_seed(0))
        assert torch.isfinite(filled).all()
        if parameter.dim() == 2:
            assert abs(filled.std() - 0.02) < 0.003
        else:
            assert (filled == (0.0 if name.endswith("bias") else 1.0)).all()
