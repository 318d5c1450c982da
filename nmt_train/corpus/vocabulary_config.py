"""The vocabulary section of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT, as_list

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")  # pieces that every vocabulary has
_Size = Annotated[int, Field(ge=16, le=10**6)]
_PAIR = Field(min_length=2, max_length=2)  # [source, target]


def _sides(value: Any) -> str:
    """Whether a value is for both languages together, or one for each."""
    return "each" if isinstance(value, list) else "both"


@dataclass(frozen=True, config=STRICT)
class VocabularyConfig:
    """The SentencePiece model that both languages share, or one for each; a run trains it unless `path` is given."""

    path: Annotated[Annotated[str, Tag("both")] | Annotated[list[str], _PAIR, Tag("each")], Discriminator(_sides)] | None = (
        Field(
            default=None,
            description="an existing SentencePiece model to use instead of training one, or [source, target]; relative to the"
            " working directory",
        )
    )
    size: Annotated[Annotated[_Size, Tag("both")] | Annotated[list[_Size], _PAIR, Tag("each")], Discriminator(_sides)] = Field(
        default=8000,
        description="number of pieces, including the four special ones; of type char or word, the largest. [source, target]:"
        " each language has its own vocabulary and embeddings",
    )
    type: Literal["unigram", "bpe", "char", "word"] = Field(
        default="unigram",
        description="SentencePiece's algorithm: unigram, bpe, char (a piece per character), or word (what stands between"
        " spaces, for text that is in pieces already)",
    )
    character_coverage: float = Field(
        default=0.9999,
        ge=0.98,
        le=1,
        description="fraction of the corpus's characters that pieces cover; rarer characters become unknown pieces",
    )
    user_defined: Annotated[list[str], BeforeValidator(as_list)] | None = Field(
        default=None,
        description="texts that become one piece each and are never split, such as placeholders: [<name>, <number>]; with init,"
        " those that the vocabulary of that model lacks are added to it",
    )
    sampling: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="subword regularization (unigram only): one of the 16 best segmentations is drawn with weight"
        " probability^sampling; 0: off",
    )

    @model_validator(mode="after")
    def _check(self) -> VocabularyConfig:
        for text in self.user_defined or ():
            if not text or text in SPECIAL or any(map(str.isspace, text)):
                raise ValueError(f"user_defined {text!r} cannot be one piece; write a word such as <name>")
        if self.sampling and self.type != "unigram":
            raise ValueError(f"sampling needs type unigram, not {self.type}; set type: unigram or sampling: 0")
        return self

    @property
    def separate(self) -> bool:
        """Whether the configuration asks for a vocabulary for each language."""
        return isinstance(self.size, list) or isinstance(self.path, list)

    @property
    def sizes(self) -> list[int]:
        """The size of the vocabulary that the run trains, or of that of each language."""
        return self.size if isinstance(self.size, list) else [self.size]
