"""Our models compute what transformers' compute from the same weights, for every variant that we read from config.json."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from rayzero3.config import parse_job
from rayzero3.config.huggingface import config_of
from rayzero3.errors import ConfigError
from rayzero3.models.build import initialize, layers_of
from rayzero3.models.context import Context

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 10000.0}
VARIANTS = {
    "neox": ("GPTNeoX", {}),
    "neox serial, tied, rotated in full": ("GPTNeoX", {"use_parallel_residual": False, "tie_word_embeddings": True, "rotary_pct": 1.0, "rotary_emb_base": 500}),
    "neox, tanh gelu, no attention bias": ("GPTNeoX", {"hidden_act": "gelu_new", "attention_bias": False, "layer_norm_eps": 1e-3}),
    "neox, half rotated, yarn": ("GPTNeoX", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "llama": ("Llama", {}),
    "llama, grouped, tied, biases": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama, dynamic, within": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama, dynamic, beyond": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "max_position_embeddings": 8}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, yarn in full": ("Llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False}}),
    "llama, yarn, given factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "llama, longrope, long": ("Llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 8}}),
    "llama, longrope, short": ("Llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 32, "factor": 4.0}}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral without a window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2, window in the upper layers": ("Qwen2", {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3, window, biases": ("Qwen3", {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "attention_bias": True, "head_dim": 8}),
}


def reference(kind: str, changes: dict) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2, generator=generator)
    return model


class Model(nn.Module):
    """A list of layers as one plain module."""

    def __init__(self, section, vocab_size=VOCABULARY):
        super().__init__()
        self.names, layers = zip(*layers_of(section, vocab_size), strict=True)
        self.layers = nn.ModuleList(layers)

    def forward(self, x, context=None):
        for layer in self.layers:
            x = layer(x, context)
        return x

    def named(self):
        """Name in the file -> parameter, tied ones once."""
        found = {}
        for prefix, layer in zip(self.names, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                if not any(parameter is other for other in found.values()):
                    found[f"{prefix}.{name}" if prefix else name] = parameter
        return found

    def fill(self, values):
        named = self.named()
        assert sorted(named) == sorted(values)
        assert {name: tuple(parameter.shape) for name, parameter in named.items()} == {name: tuple(value.shape) for name, value in values.items()}
        filled = {id(parameter): nn.Parameter(values[name].clone()) for name, parameter in named.items()}
        for module in self.modules():
            module._parameters.update({name: filled[id(parameter)] for name, parameter in module._parameters.items() if parameter is not None})
        return self


def section_in(folder):
    return parse_job({"name": "x", "model": {"init_from": str(folder)}, "data": {"path": "x"}}).model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_the_reference(variant, tmp_path):
    theirs = reference(*VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    section = section_in(tmp_path)
    mine = Model(section).fill(load_file(tmp_path / "model.safetensors"))
    ids = torch.randint(VOCABULARY, (3, 19), generator=torch.Generator().manual_seed(2))
    got, expected = mine(ids), theirs(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    labels = torch.randint(VOCABULARY, (3, 19), generator=torch.Generator().manual_seed(3))
    loss = mine(ids, Context(labels=labels))
    loss.backward()
    reference_loss = nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    reference_loss.backward()
    torch.testing.assert_close(loss, reference_loss, rtol=1e-5, atol=0.0)
    gradients = {id(parameter): parameter.grad for parameter in theirs.parameters()}
    compared = 0
    for name, parameter in mine.named().items():
        expected_grad = gradients[id(theirs.get_parameter(name.replace("embed_out", "lm_head") if not hasattr(theirs, "embed_out") else name))]
        assert (parameter.grad - expected_grad).norm() <= 1e-5 * expected_grad.norm() + 1e-6, name
        compared += 1
    assert compared == len(gradients)


def test_the_rotary_table_is_fp32_under_bf16():
    section = parse_job({"name": "x", "model": {"layers": 1, "width": 32, "heads": 4}, "data": {"path": "x"}}).model
    rotary = layers_of(section, VOCABULARY)[1][1].attention.rotary
    query = torch.randn(1, 4, 9, 8).bfloat16()
    rotated, _ = rotary(query, query, Context())
    exact, _ = rotary(query.float(), query.float(), Context())
    assert rotated.dtype is torch.bfloat16 and torch.equal(rotated, exact.bfloat16())


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_initialisation_has_a_rule_for_every_parameter(family):
    model = {"family": family, "layers": 2, "width": 32, "heads": 2}
    model |= {"query_key_norm": True, "input_bias": True} if family == "llama" else {}
    for name, parameter in Model(parse_job({"name": "x", "model": model, "data": {"path": "x"}}).model).named().items():
        filled = torch.full(parameter.shape, torch.nan)
        initialize(name, filled, torch.Generator().manual_seed(0))
        assert torch.isfinite(filled).all()
        if parameter.dim() == 2:
            assert abs(filled.std() - 0.02) < 0.003
        else:
            assert (filled == (0.0 if name.endswith("bias") else 1.0)).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_config_describes_the_same_model(variant, tmp_path):
    """config.json -> section -> config.json -> section; and transformers reads what we write as it read its own."""
    kind, changes = VARIANTS[variant]
    theirs = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    (tmp_path / "a").mkdir()
    theirs.save_pretrained(tmp_path / "a")
    section = section_in(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(config_of(section, VOCABULARY)))
    again = section_in(tmp_path / "b")
    assert again.model_copy(update={"init_from": None}) == section.model_copy(update={"init_from": None})
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "b"))
    assert {name: tuple(value.shape) for name, value in Model(section).named().items()} == {
        name.replace("lm_head", "embed_out") if kind == "GPTNeoX" else name: tuple(value.shape) for name, value in model.named_parameters()
    }


OLDER = {
    "llama 3.1, as the hub has it": (
        {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"rotary_base": 500000.0},
    ),
    "gpt-neox-20b, as the hub has it": (
        {"model_type": "gpt_neox", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_act": "gelu_fast", "rotary_pct": 0.25, "torch_dtype": "float16"},
        {"activation": "gelu_tanh", "rotary_fraction": 0.25},
    ),
    "smollm, as the hub has it": (
        {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "transformers.js_config": {"dtype": "q4"}},
        {"family": "llama", "mlp_bias": False},
    ),
    "qwen 2.5, as the hub has it": (
        {"model_type": "qwen2", "use_mrope": False, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 70},
        {"window": None, "input_bias": True, "output_bias": False},
    ),
    "the older name of the variant": ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rotary_base": 10000.0}),
    "pythia": ({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 20000}, {"rotary_base": 20000.0, "rotary_fraction": 0.5}),
}


@pytest.mark.parametrize("case", OLDER)
def test_keys_of_older_files_are_read(case, tmp_path):
    values, expected = OLDER[case]
    (tmp_path / "config.json").write_text(json.dumps(SMALL | values))
    section = section_in(tmp_path)
    assert {key: getattr(section, key) for key in expected} == expected
    assert ("rope_scaling" in values) == (section.rotary_scaling is not None)


REFUSED = {
    "a key that nobody knows": ({"logit_softcap": 30.0}, "logit_softcap"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout"),
    "another activation": ({"hidden_act": "relu"}, "hidden_act"),
    "another model": ({"model_type": "mamba"}, "model_type"),
    "quantized weights": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "an unknown rotary variant": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type"),
    "an unknown rotary key": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "twist": 1}}, "twist"),
    "a part of each head rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "layer types of another kind": ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3, "use_sliding_window": True}, "layer_types"),
    "parallel training of the weights": ({"pretraining_tp": 2}, "pretraining_tp"),
    "a number that is missing": ({"hidden_size": None}, "hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_models_do_not_compute_is_refused_by_name(case, tmp_path):
    values, named = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SMALL | values))
    with pytest.raises(ConfigError, match=named):
        section_in(tmp_path)
