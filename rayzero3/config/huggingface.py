"""config.json of a Hugging Face folder, to a model section and back. Pure JSON: neither torch nor transformers.

A key that this file does not know, or a value that our models do not compute, is an error that names it: nothing is passed over that
could change a logit. What changes none is listed in _NO_MATTER.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rayzero3.config.architectures import Architecture, GptNeox, Llama
from rayzero3.errors import ConfigError

CONFIG = "config.json"
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_NO_MATTER = {
    *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache", "tokenizer_class"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id", "return_dict"),
    *("initializer_range", "classifier_dropout", "problem_type", "id2label", "label2id", "task_specific_params", "_attn_implementation"),
    *("_attn_implementation_autoset", "use_bfloat16", "torchscript", "chunk_size_feed_forward"),
    "transformers.js_config",
}
"""Keys that change no logit."""
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "pretraining_tp": (1, None),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "rope_interleaved": (False, None),
    "is_llama_config": (True, None),
    "use_mrope": (False, None),
    "attention_probs_dropout_prob": (0, None),
    "hidden_dropout_prob": (0, None),
}
"""Keys with the only values that our models compute."""


class _Reader:
    """The keys of a config.json, each taken once; `end` refuses what nobody took."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self._left = path, dict(values)

    def take(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, default)
        return default if value is None else value

    def need(self, key: str) -> Any:
        if self._left.get(key) is None:
            raise ConfigError(f"{key} is missing in {self.path}", None, None, "Give a folder that transformers wrote.")
        return self._left.pop(key)

    def fault(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"{key} in {self.path}", json.dumps(value), expected, "Use another model, or model: {transformers: FOLDER}, which runs transformers' own."
        )

    def end(self) -> None:
        for key, value in self._left.items():
            if key in _MUST_BE:
                if value not in _MUST_BE[key]:
                    raise self.fault(key, value, f"our models compute {json.dumps(_MUST_BE[key][0])} only")
            elif key not in _NO_MATTER:
                raise self.fault(key, value, "our models don't know this key")


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises ConfigError if it can't be read."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}", "not readable", str(error), "Give a folder with config.json and safetensors, as transformers saves it.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}", type(values).__name__, "expected an object", "Give a folder that transformers wrote.")
    return values


def complete(raw: dict[str, Any]) -> dict[str, Any]:
    """A model section as it stands in a job file, with the numbers of `init_from` where it gives none itself.

    Raises:
        ConfigError: config.json can't be read, or has a key or value that our models don't compute.
    """
    if not isinstance(raw.get("init_from"), str) or raw.keys() - {"init_from", "family"}:
        return raw
    section = section_of(Path(raw["init_from"]).expanduser())
    if "family" in raw and raw["family"] != section["family"]:
        raise ConfigError("model.family", raw["family"], f"{raw['init_from']} holds a {section['family']}", "Leave family out.")
    return section | {"init_from": raw["init_from"]}


def section_of(folder: Path) -> dict[str, Any]:
    """The model section that a folder's config.json describes. Raises ConfigError as `complete` does."""
    values = read_config(folder)
    reader, kind = _Reader(folder / CONFIG, values), values.get("model_type")
    if kind not in _FAMILIES:
        raise reader.fault("model_type", kind, f"our models are {', '.join(_FAMILIES)}")
    section = {
        "layers": reader.need("num_hidden_layers"),
        "width": reader.need("hidden_size"),
        "heads": reader.need("num_attention_heads"),
        "mlp_width": reader.need("intermediate_size"),
        "vocab_size": reader.need("vocab_size"),
        "max_length": reader.take("max_position_embeddings", 2048),
        "tie_embeddings": reader.take("tie_word_embeddings", False),
    } | _FAMILIES[kind](reader, values)
    reader.end()
    return section


def _gpt_neox(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    activation = reader.take("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise reader.fault("hidden_act", activation, f"our GPT-NeoX computes {', '.join(_ACTIVATIONS)}")
    return {
        "family": "gpt_neox",
        "activation": _ACTIVATIONS[activation],
        "attention_bias": reader.take("attention_bias", True),
        "layer_norm_eps": reader.take("layer_norm_eps", 1e-5),
        "parallel_residual": reader.take("use_parallel_residual", True),
    } | _rotary(reader, reader.take("rotary_emb_base", 10000), reader.take("rotary_pct", 0.25), "rotary_fraction")


def _llama(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    kind, layers = values["model_type"], values["num_hidden_layers"]
    activation = reader.take("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise reader.fault("hidden_act", activation, "our Llama computes silu")
    bias = kind == "qwen2" or (reader.take("attention_bias", False) if kind != "mistral" else False)
    window, full = _window(reader, kind, layers)
    size = reader.take("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return {
        "family": "llama",
        "key_value_heads": reader.take("num_key_value_heads"),
        "head_size": None if size == values["hidden_size"] // values["num_attention_heads"] else size,
        "norm_eps": reader.take("rms_norm_eps", 1e-6),
        "input_bias": bias,
        "output_bias": bias and kind != "qwen2",
        "mlp_bias": reader.take("mlp_bias", False) if kind == "llama" else False,
        "query_key_norm": kind == "qwen3",
        "window": window,
        "full_layers": full,
    } | _rotary(reader, 10000, 1.0, None)


def _window(reader: _Reader, kind: str, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, and the layers that it does not bind."""
    if kind == "llama":
        return None, ()
    window = reader.take("sliding_window")
    types, used = reader.take("layer_types"), kind == "mistral" or reader.take("use_sliding_window", False)
    from_layer = reader.take("max_window_layers", 28 if kind != "mistral" else 0)
    if types is not None:
        if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
            raise reader.fault("layer_types", types, f"expected full_attention or sliding_attention for each of {layers} layers")
        full = tuple(index for index, name in enumerate(types) if name == "full_attention")
        return (window if used and len(full) < layers else None), (full if used and window else ())
    return (window, tuple(range(min(from_layer, layers)))) if used and window else (None, ())


def _rotary(reader: _Reader, base: float, fraction: float, fraction_key: str | None) -> dict[str, Any]:
    """Base, fraction and scaling, from rope_parameters or from the keys of older files."""
    scaling = dict(reader.take("rope_parameters") or {}) | dict(reader.take("rope_scaling") or {})
    base, fraction = reader.take("rope_theta", base), reader.take("partial_rotary_factor", fraction)
    base, fraction = scaling.pop("rope_theta", base), scaling.pop("partial_rotary_factor", fraction)
    kind, older = scaling.pop("rope_type", None), scaling.pop("type", None)
    kind = kind or older or "default"
    found: dict[str, Any] = {"rotary_base": float(base)}
    if fraction_key is not None:
        found[fraction_key] = fraction
    elif fraction != 1.0:
        raise reader.fault("partial_rotary_factor", fraction, "our Llama rotates whole heads")
    scaling = {key: value for key, value in scaling.items() if value is not None}
    if kind == "default" and not scaling:
        return found
    known = {"linear", "dynamic", "yarn", "longrope", "llama3"}
    if kind not in known:
        raise reader.fault("rope_type", kind if kind != "default" else scaling, f"our models compute {', '.join(sorted(known))}")
    outer = reader.take("original_max_position_embeddings")
    if outer is not None:
        scaling["original_max_position_embeddings"] = outer
    return found | {"rotary_scaling": {"rope_type": kind, **scaling}}


_FAMILIES = {"gpt_neox": _gpt_neox, "llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama}


def config_of(section: Architecture, vocab_size: int) -> dict[str, Any]:
    """The config.json of an exported model.

    Raises:
        ConfigError: no model of the hub has this combination of numbers.
    """
    rotary: dict[str, Any] = {"rope_theta": section.rotary_base, "rope_type": "default"}
    if section.rotary_scaling is not None:
        rotary |= section.rotary_scaling.model_dump(mode="json", exclude_none=True)
    found = {
        "vocab_size": vocab_size,
        "hidden_size": section.width,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "intermediate_size": section.mlp,
        "max_position_embeddings": section.max_length,
        "tie_word_embeddings": section.tie_embeddings,
        "attention_dropout": 0.0,
    }
    if isinstance(section, GptNeox):
        names = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
        return found | {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            "hidden_act": names[section.activation],
            "hidden_dropout": 0.0,
            "layer_norm_eps": section.layer_norm_eps,
            "use_parallel_residual": section.parallel_residual,
            "attention_bias": section.attention_bias,
            "rope_parameters": rotary | {"partial_rotary_factor": section.rotary_fraction},
            "rotary_pct": section.rotary_fraction,
            "rotary_emb_base": section.rotary_base,
        }
    kind = _kind_of(section)
    found |= {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "num_key_value_heads": section.groups,
        "head_dim": section.head_width,
        "rms_norm_eps": section.norm_eps,
        "rope_parameters": rotary,
        "rope_theta": section.rotary_base,
    }
    if section.rotary_scaling is not None:
        found["rope_scaling"] = {key: value for key, value in rotary.items() if key != "rope_theta"}
    if kind in ("llama", "qwen3"):
        found["attention_bias"] = section.input_bias
    if kind == "llama":
        found["mlp_bias"] = section.mlp_bias
    else:
        found["sliding_window"] = section.window
    if kind in ("qwen2", "qwen3"):
        types = ["sliding_attention" if section.window_of(layer) else "full_attention" for layer in range(section.layers)]
        found |= {"use_sliding_window": section.window is not None, "layer_types": types}
    return found


def _kind_of(section: Llama) -> str:
    """The first kind of the hub that can say all that a section says."""
    biases = (section.input_bias, section.output_bias)
    plain = not section.mlp_bias and not section.query_key_norm
    if section.window is None and not section.query_key_norm and biases[0] == biases[1]:
        return "llama"
    if section.window is not None and plain and biases == (False, False) and not section.full_layers:
        return "mistral"
    if plain and biases == (True, False):
        return "qwen2"
    if section.query_key_norm and not section.mlp_bias and biases[0] == biases[1]:
        return "qwen3"
    raise ConfigError(
        "this Llama can't be exported",
        None,
        "no model on the hub has its combination of input_bias, output_bias, mlp_bias, query_key_norm, window and full_layers",
        "Use those of Llama, Mistral, Qwen 2 or Qwen 3.",
    )
