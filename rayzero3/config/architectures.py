"""The model section: the numbers of an architecture, in words of our own whatever a file on the hub calls them.

A model is built from these numbers and initialised from the job's seed; or `init_from` names a Hugging Face folder, whose config.json
gives the numbers (see `rayzero3.config.huggingface`) and whose safetensors give the weights; or `transformers` names a folder with any
other causal model, which the transformers library then builds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from rayzero3.config.values import Count, CountOrZero, Section


class RotaryScaling(Section):
    """How the rotary frequencies are stretched for long texts. Keys as in config.json."""

    rope_type: Literal["linear", "dynamic", "yarn", "longrope", "llama3"] = Field(description="variant")
    factor: float | None = Field(None, gt=0, description="how many times longer than it was trained for")
    original_max_position_embeddings: Count | None = Field(None, description="length that it was trained for; derived: max_length")
    low_freq_factor: float | None = Field(None, gt=0, description="llama3")
    high_freq_factor: float | None = Field(None, gt=0, description="llama3")
    beta_fast: float | None = Field(None, description="yarn; derived: 32")
    beta_slow: float | None = Field(None, description="yarn; derived: 1")
    truncate: bool | None = Field(None, description="yarn; derived: true")
    attention_factor: float | None = Field(None, description="yarn, longrope: scale of the rotated channels; derived")
    mscale: float | None = Field(None, description="yarn")
    mscale_all_dim: float | None = Field(None, description="yarn")
    short_factor: tuple[float, ...] | None = Field(None, description="longrope: one number for each pair of channels")
    long_factor: tuple[float, ...] | None = Field(None, description="longrope: one number for each pair of channels")

    NEEDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }

    def missing(self) -> list[str]:
        """Keys that the variant needs and that are not there."""
        return [key for key in self.NEEDS[self.rope_type] if getattr(self, key) is None]


class Architecture(Section):
    """What the families share."""

    init_from: Path | None = Field(None, description="Hugging Face folder whose weights the run starts from; its config.json gives the numbers below")
    layers: Count = Field(description="transformer blocks")
    width: Count = Field(description="hidden size d")
    heads: Count = Field(description="attention heads")
    vocab_size: Count | None = Field(None, description="rows of the embedding; derived: the tokenizer's vocabulary")
    max_length: Count = Field(2048, description="positions that it is meant for; only rotary scaling and exported files go by it")
    rotary_base: float = Field(10000.0, gt=1, description="base of the rotary frequencies")
    rotary_scaling: RotaryScaling | None = Field(None, description="stretches the rotary frequencies for long texts; keys as in config.json")
    tie_embeddings: bool = Field(False, description="the readout is the embedding, transposed")

    def faults(self) -> list[str]:
        """What is wrong with the numbers together, a sentence each."""
        found = []
        if self.rotary_scaling and (missing := self.rotary_scaling.missing()):
            found.append(f"model.rotary_scaling is {self.rotary_scaling.rope_type}; it needs {', '.join(missing)}. Add what is missing.")
        scaling = self.rotary_scaling
        if scaling and scaling.rope_type == "longrope" and not scaling.factor and scaling.attention_factor is None and not scaling.original_max_position_embeddings:
            found.append("model.rotary_scaling is longrope; it needs factor, attention_factor or original_max_position_embeddings. Add one.")
        for key in ("short_factor", "long_factor"):
            factors = getattr(scaling, key, None)
            if factors is not None and len(factors) != self.rotary_width // 2:
                found.append(f"model.rotary_scaling.{key} has {len(factors)} numbers; {self.rotary_width} rotated channels need {self.rotary_width // 2}.")
        return found


class GptNeox(Architecture):
    """GPT-NeoX, Pythia among them: layer norms, a part of each head rotated, GELU."""

    family: Literal["gpt_neox"] = Field("gpt_neox", description="architecture")
    mlp_width: Count | None = Field(None, description="hidden size of the feed-forward part; derived: 4 x width")
    rotary_fraction: float = Field(0.25, gt=0, le=1, description="part of each head that is rotated by position")
    parallel_residual: bool = Field(True, description="attention and feed-forward read the same residual")
    activation: Literal["gelu", "gelu_tanh"] = Field("gelu", description="of the feed-forward part")
    attention_bias: bool = Field(True, description="biases in the attention's projections")
    layer_norm_eps: float = Field(1e-5, gt=0, description="epsilon of the layer norms")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Channels of one head that are rotated; even."""
        return int(self.head_width * self.rotary_fraction)

    @property
    def mlp(self) -> int:
        """Hidden size of the feed-forward part."""
        return self.mlp_width or 4 * self.width

    def faults(self) -> list[str]:
        """As above; heads must divide the width, and an even number of channels is rotated."""
        if self.width % self.heads:
            return [_undivided(self.width, self.heads)]
        found = super().faults()
        if self.rotary_width % 2 or not self.rotary_width:
            found.append(
                f"model.rotary_fraction is {self.rotary_fraction}; of {self.head_width} channels a head it rotates {self.rotary_width}, "
                "which must be even and not zero. Try rotary_fraction: 1.0, or a width / heads that is a multiple of 8."
            )
        return found


class Llama(Architecture):
    """The shape that Llama 2 and 3, Mistral, Qwen 2 and 3 and SmolLM share: RMSNorm, rotary, grouped queries, SwiGLU."""

    family: Literal["llama"] = Field("llama", description="architecture")
    key_value_heads: Count | None = Field(None, description="heads of keys and values, each shared by heads / key_value_heads queries; derived: heads")
    head_size: Count | None = Field(None, description="channels of one head; derived: width / heads")
    mlp_width: Count | None = Field(None, description="hidden size of the feed-forward part; derived: 8/3 x width, rounded up to a multiple of 64")
    norm_eps: float = Field(1e-6, gt=0, description="epsilon of the norms")
    input_bias: bool = Field(False, description="biases in the projections to queries, keys and values")
    output_bias: bool = Field(False, description="bias in the attention's output projection")
    mlp_bias: bool = Field(False, description="biases in the feed-forward part")
    query_key_norm: bool = Field(False, description="a norm over each head's query and key")
    window: Count | None = Field(None, description="tokens that a token sees, itself included; none: all before it")
    full_layers: tuple[CountOrZero, ...] = Field((), description="blocks, counted from 0, that the window does not bind")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.head_size or self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Channels of one head that are rotated: all."""
        return self.head_width

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.key_value_heads or self.heads

    @property
    def mlp(self) -> int:
        """Hidden size of the feed-forward part."""
        return self.mlp_width or -(-8 * self.width // (3 * 64)) * 64

    def window_of(self, layer: int) -> int | None:
        """Tokens that a token sees in a block; None: all before it."""
        return None if layer in self.full_layers else self.window

    def faults(self) -> list[str]:
        """As above; key_value_heads must divide the heads."""
        found = super().faults()
        if self.head_size is None and self.width % self.heads:
            found.append(_undivided(self.width, self.heads))
        if self.heads % self.groups:
            fits = [count for count in range(self.groups, 0, -1) if self.heads % count == 0][0]
            found.append(f"model.key_value_heads is {self.groups}; model.heads {self.heads} must be a multiple of it. Try key_value_heads: {fits}.")
        if self.head_width % 2:
            found.append(f"model.head_size is {self.head_width}; rotation needs an even number. Try head_size: {self.head_width + 1}.")
        return found


class Transformers(Section):
    """Any causal model that the transformers library can build."""

    family: Literal["transformers"] = Field("transformers", description="architecture")
    transformers: Path = Field(description="folder with any causal model of the transformers library, sharded as it is; alone in its section")

    @property
    def init_from(self) -> Path:
        """Where the weights come from."""
        return self.transformers

    @property
    def vocab_size(self) -> int | None:
        """Derived when the model is built."""
        return None

    def faults(self) -> list[str]:
        """None that could be told from here."""
        return []


def _undivided(width: int, heads: int) -> str:
    fits = [h for h in range(heads, 0, -1) if width % h == 0][0]
    wider = -(-width // (8 * heads)) * 8 * heads
    return f"model.heads is {heads}; model.width {width} must be a multiple of it. Try heads: {fits} or width: {wider}."


def _family(raw: Any) -> str:
    if isinstance(raw, dict):
        return "transformers" if "transformers" in raw else str(raw.get("family", "gpt_neox"))
    return getattr(raw, "family", "gpt_neox")


Model = Annotated[
    Annotated[GptNeox, Tag("gpt_neox")] | Annotated[Llama, Tag("llama")] | Annotated[Transformers, Tag("transformers")],
    Discriminator(_family),
]
"""The model section of a job."""
