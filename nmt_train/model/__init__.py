"""The model section of the configuration: a preset or individual keys determine the sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from nmt_train.common.section import STRICT

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"encoder_layers": 4, "decoder_layers": 4, "dim": 128, "ffn_dim": 256, "heads": 4, "dropout": 0.3},
    "small": {"encoder_layers": 3, "decoder_layers": 3, "dim": 256, "ffn_dim": 1024, "heads": 4, "dropout": 0.1},
    "base": {"encoder_layers": 6, "decoder_layers": 6, "dim": 512, "ffn_dim": 2048, "heads": 8, "dropout": 0.1},
    "big": {"encoder_layers": 6, "decoder_layers": 6, "dim": 1024, "ffn_dim": 4096, "heads": 16, "dropout": 0.3},
}
Preset = Literal["tiny", "small", "base", "big"]
SEPARATE = "all would share one matrix, but source and target have separate vocabularies; set it to target-output"
SIZES = tuple(key for key in PRESETS["small"] if key != "dropout")  # the keys that a preset sets, but for dropout


@dataclass(frozen=True, config=STRICT)
class GuidedAlignmentConfig:
    """Guided alignment (Garg et al. 2019): the first head of a decoder layer learns the alignments of the corpus."""

    layer: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="decoder layer, from 1, whose first head attends to the source words that a target word is aligned with;"
        " the last but one is usual; null: none",
    )
    weight: float = Field(
        default=0.05,
        ge=0,
        le=1000,
        description="weight of the head's cross-entropy in the cost, both per target token; 0: the head learns no more, and the"
        " corpus needs no alignments",
    )


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """An encoder-decoder transformer (Vaswani et al. 2017); the preset sets the sizes that no other key sets."""

    preset: Preset = Field(
        default="small",
        description="default sizes: tiny, small, base or big, which the keys below override; auto: by the size of the corpus,"
        " but small if one of the sizes is given",
    )
    encoder_layers: int = Field(default=3, ge=1, le=1000, description="layers of the encoder")
    decoder_layers: int = Field(default=3, ge=1, le=1000, description="layers of the decoder")
    dim: int = Field(default=256, ge=2, le=10**6, description="width of embeddings and layers [elements, even]")
    ffn_dim: int = Field(default=1024, ge=1, le=10**6, description="inner width of the feed-forward blocks [elements]")
    heads: int = Field(default=4, ge=1, le=10**6, description="attention heads; must divide dim")
    norm: Literal["pre", "post"] = Field(
        default="pre", description="layer norm: pre (before each block) or post (after its residual sum)"
    )
    tied: Literal["all", "target-output", "none"] = Field(
        default="all", description="embeddings that share one matrix: all (source, target and output), target-output, or none"
    )
    activation: Literal["relu", "swish"] = Field(default="relu", description="nonlinearity of the feed-forward blocks")
    output_bias: bool = Field(default=False, description="whether the output layer has a bias per piece")
    conventions: Literal["standard", "marian", "m2m100"] = Field(
        default="standard",
        description="details of the model: standard; those of Marian, which nmt-export --to marian needs beside norm: post:"
        " its sinusoids, a zero vector as first input of the decoder, padding and begin never predicted; or m2m100, those of"
        " M2M100 and NLLB, which nmt-import reads: their positions, and pieces of the languages before source and target",
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="with init: train only factors of this rank beside each projection of attention (LoRA), which the workers"
        " exchange instead of gradients of all parameters; null: train all",
    )
    dropout: float = Field(default=0.1, ge=0, lt=1, description="dropout of embeddings and block outputs [probability]")
    dropout_attention: float = Field(default=0.0, ge=0, lt=1, description="dropout of attention weights [probability]")
    dropout_ffn: float = Field(default=0.0, ge=0, lt=1, description="dropout inside feed-forward blocks [probability]")
    dropout_source_words: float = Field(default=0.0, ge=0, lt=1, description="dropout of whole source pieces [probability]")
    dropout_target_words: float = Field(default=0.0, ge=0, lt=1, description="dropout of whole target pieces [probability]")
    label_smoothing: float = Field(
        default=0.1, ge=0, lt=1, description="share of each label spread evenly over the vocabulary, in training only"
    )
    guided_alignment: GuidedAlignmentConfig = Field(default_factory=GuidedAlignmentConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        values = dict(given.kwargs or {}) if isinstance(given, ArgsKwargs) else given
        if not isinstance(values, dict):
            return given
        sizes = PRESETS.get(str(values.get("preset", "small")), {})
        return {**sizes, **values}

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.dim % 2:
            raise ValueError(f"dim {self.dim} is odd; sinusoidal positions need an even width")
        if self.conventions != "standard" and self.dim < 4:
            raise ValueError(f"dim {self.dim} is too small for the sinusoids of Marian and M2M100, which need at least 4")
        return self

    @property
    def layer_norm_epsilon(self) -> float:
        return 1e-6 if self.conventions == "marian" else 1e-5

    @property
    def languages(self) -> bool:
        """Whether the piece LANGUAGE comes before every source, and END, then BEGIN, before every target."""
        return self.conventions == "m2m100"
