"""Tiny Hugging Face folders, made by transformers: what users have, in small."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
END = "<|endoftext|>"


def make_folder(path: Path, kind: str = "Llama", shard_bytes: int | str = "5GB", dtype: torch.dtype = torch.float32, **changes) -> torch.nn.Module:
    """Save a model of random weights and a byte-level tokenizer; the model."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0} | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)
    model.save_pretrained(path, max_shard_size=shard_bytes)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def load(path: Path) -> torch.nn.Module:
    """A folder as transformers loads it, with every name in its place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()
