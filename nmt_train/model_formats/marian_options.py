"""Marian's options of a model, which its .npz file holds as `special:model.yml`, and our configuration of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from nmt_train import __version__
from nmt_train.common.errors import UserError
from nmt_train.common.section import listed, problem
from nmt_train.model import ModelConfig

SPECIAL = "special:model.yml"
_BLOCK = 256  # Marian pads the text with zeros to a multiple of this [bytes]
# The values of Marian's options with which a model is one of ours; the first one is Marian's default.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-ffn-activation": ("swish", "relu"),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-attention-mask": ("default",),
    "transformer-train-position-embeddings": (False,),
    "transformer-disable-position-embeddings": (False,),
    "transformer-no-projection": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-pool": (False,),
    "transformer-tied-layers": ([],),
    "input-types": ([], ["sequence", "sequence"]),
    "lemma-dim-emb": (0,),
    "factors-combine": ("sum",),
    "right-left": (False,),
    "ulr": (False,),
}
# Other options that matter, with Marian's defaults.
_DEFAULTS: dict[str, Any] = {
    "enc-depth": 1, "dec-depth": 1, "dim-emb": 512, "transformer-dim-ffn": 2048, "transformer-decoder-dim-ffn": 0,
    "transformer-heads": 8, "transformer-preprocess": "", "transformer-postprocess": "dan", "transformer-postprocess-top": "",
    "tied-embeddings": False, "tied-embeddings-src": False, "tied-embeddings-all": False, "output-omit-bias": False,
}  # fmt: skip
_ORDER = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
# Where the layer norms are: n normalizes, a adds the input of the block, d (dropout) matters only in training.
_NORMS = {"post": ("", "dan", ""), "pre": ("n", "da", "n")}
_TIED = {"all": ("tied-embeddings-all",), "target-output": ("tied-embeddings",), "none": ()}


def parse(held: np.ndarray | None, where: str) -> dict[str, Any]:
    """Return Marian's options, defaults included, from the array that a file holds as `SPECIAL`.

    Raises UserError if they are missing or damaged, or if the model has something that ours lack; it names the option.
    """
    if held is None:
        raise UserError(f"{where}: has no {SPECIAL}; give a model that Marian has saved, not the state of its optimizer")
    try:
        found = yaml.safe_load(held.tobytes().rstrip(b"\0").decode())
        if not isinstance(found, dict):
            raise ValueError
    except (ValueError, yaml.YAMLError, RecursionError):
        raise UserError(f"{where}: its {SPECIAL} is damaged; copy the file again") from None
    present = {name: value for name, value in found.items() if value is not None}  # Marian writes ~ for what it does not know
    options = {name: allowed[0] for name, allowed in _ALLOWED.items()} | _DEFAULTS | present
    for name, allowed in _ALLOWED.items():
        if options[name] not in allowed:
            wanted = listed({repr(value): None for value in allowed})
            raise UserError(f"{where}: {name} is {options[name]!r}; only models with {wanted} can be read")
    if options["transformer-decoder-dim-ffn"] not in (0, options["transformer-dim-ffn"]):
        raise UserError(
            f"{where}: transformer-decoder-dim-ffn is not transformer-dim-ffn; only models with equal ones can be read"
        )
    return options


def to_config(options: Mapping[str, Any], where: str) -> ModelConfig:
    """Our configuration of the model with Marian's `options`; UserError if there is none."""
    try:
        return ModelConfig(
            encoder_layers=options["enc-depth"], decoder_layers=options["dec-depth"], dim=options["dim-emb"],
            ffn_dim=options["transformer-dim-ffn"], heads=options["transformer-heads"], norm=_norm(options, where),
            tied=_tied(options), activation=options["transformer-ffn-activation"],
            output_bias=not options["output-omit-bias"], conventions="marian",
        )  # fmt: skip
    except ValidationError as error:
        raise UserError(f"{where}: its {SPECIAL} is not of a model that can be read: {problem(error).text}") from None


def from_config(config: ModelConfig, pieces: list[int]) -> np.ndarray:
    """Marian's options of our model, as the array `SPECIAL`. pieces: the sizes of both vocabularies."""
    options = {name: allowed[0] for name, allowed in _ALLOWED.items()} | _DEFAULTS | {
        "dim-vocabs": pieces, "dim-emb": config.dim, "enc-depth": config.encoder_layers, "dec-depth": config.decoder_layers,
        "transformer-heads": config.heads, "transformer-dim-ffn": config.ffn_dim,
        "transformer-ffn-activation": config.activation, "output-omit-bias": not config.output_bias,
        "version": f"nmt_train {__version__}",
    }  # fmt: skip
    options |= zip(_ORDER, _NORMS[config.norm], strict=True)
    options |= dict.fromkeys(_TIED[config.tied], True)
    text = yaml.safe_dump(options).encode()
    return np.frombuffer(text.ljust((len(text) // _BLOCK + 1) * _BLOCK, b"\0"), np.int8)


def _norm(options: Mapping[str, Any], where: str) -> Any:
    given = [str(options[name]) for name in _ORDER]
    for norm, wanted in _NORMS.items():
        if [steps.replace("d", "") for steps in given] == [steps.replace("d", "") for steps in wanted]:
            return norm
    said = ", ".join(f"{name} {steps!r}" for name, steps in zip(_ORDER, given, strict=True))
    raise UserError(f"{where}: {said}; only models with '', 'dan', '' (post-norm) or 'n', 'da', 'n' (pre-norm) can be read")


def _tied(options: Mapping[str, Any]) -> Any:
    if options["tied-embeddings-all"] or (options["tied-embeddings"] and options["tied-embeddings-src"]):
        return "all"
    return "target-output" if options["tied-embeddings"] else "none"
