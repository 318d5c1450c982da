"""Reads folders of Hugging Face: their configuration, their weights, and how both become ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from nmt_train.common.errors import UserError, unreadable
from nmt_train.common.section import problem
from nmt_train.model import ModelConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats.weights import from_bart, layers
from nmt_train.run.checkpoint import read_tensors

CONFIG = "config.json"
PYTORCH, SAFETENSORS = "pytorch_model.bin", "model.safetensors"
SHARED = "model.shared.weight"  # the embeddings of both sides
_KIND = "give the folder of a MarianMT, M2M100 or NLLB model"
_ELSE = f"{_KIND} (to continue from a model of nmt_train, set init)"


def model_config(found: Mapping[str, Any], folder: Path, needed: Mapping[str, tuple[Any, ...]], **values: Any) -> ModelConfig:
    """The configuration of the model that config.json describes. found: its content. values: what it does not say.

    needed: the values that keys must have for a model that we support; None: the key may be missing. Raises UserError if
    another model is described, or none.
    """
    path = folder / CONFIG
    for key, allowed in needed.items():
        if found.get(key) not in allowed:
            raise UserError(f"{path}: {key} is {found.get(key)!r}; only models with {allowed[0]!r} can be read")
    for left, right in (
        ("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads"),
        ("vocab_size", "decoder_vocab_size"),
    ):  # fmt: skip
        if found.get(right) not in (found.get(left), None):
            raise UserError(f"{path}: {left} and {right} differ; only models with equal ones can be read")
    try:
        return ModelConfig(
            encoder_layers=found["encoder_layers"], decoder_layers=found["decoder_layers"], dim=found["d_model"],
            ffn_dim=found["encoder_ffn_dim"], heads=found["encoder_attention_heads"],
            activation="relu" if found["activation_function"] == "relu" else "swish",
            dropout=found.get("dropout", 0.1), dropout_attention=found.get("attention_dropout", 0.0),
            dropout_ffn=found.get("activation_dropout", 0.0), **values,
        )  # fmt: skip
    except (KeyError, ValidationError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else problem(error).text
        raise UserError(f"{path}: not the configuration of a model that can be read: {why}; give another folder") from None


def layer_parameters(found: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The parameters of the layers under our names, fp32; UserError if some are missing."""
    try:
        return from_bart(found, config)
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"{folder}: a parameter is missing or has another shape ({error}); it has other weights than config.json describes"
        ) from None


def embedding(found: Mapping[str, Tensor], names: tuple[str, ...], shape: tuple[int, int], folder: Path) -> Tensor:
    """The first of the matrices with these names that there is, fp32; UserError if there is none of this shape."""
    matrix = next((found[name] for name in names if name in found), None)
    if matrix is None or matrix.shape != shape:
        raise UserError(f"{folder}: {names[0]} is missing, or is not one vector of {shape[1]} per piece")
    return matrix.float()


def compare(
    parameters: Mapping[str, Tensor], found: Mapping[str, Tensor], config: ModelConfig, pieces: int, folder: Path
) -> None:
    """Raise UserError if config.json describes another model than the weights are of."""
    with torch.device("meta"):
        wanted = {name: parameter.shape for name, parameter in Transformer(config, pieces).named_parameters()}
    wrong = [name for name in wanted if name not in parameters or parameters[name].shape != wanted[name]]
    known = {theirs for _, names in layers(config) for theirs in names}
    wrong += [name for name in found if ".layers." in name and name not in known]
    if wrong:
        raise UserError(f"{folder}: {wrong[0]} does not fit config.json; it describes another model than the weights are of")


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder by name. Raises UserError if they cannot be read."""
    try:
        if (folder / SAFETENSORS).exists():
            return read_tensors(folder / SAFETENSORS)
        loaded = torch.load(folder / PYTORCH, map_location="cpu", weights_only=True)  # executes no code from the file
        return {str(name): tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
    except FileNotFoundError:
        raise UserError(f"{folder}: has neither {SAFETENSORS} nor {PYTORCH}; {_KIND}") from None
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        AttributeError,
        LookupError,
        UnpicklingError,
    ) as error:
        raise UserError(
            f"{folder}: its weights cannot be read ({type(error).__name__}); download them again, or run git lfs pull"
        ) from None


def content(path: Path, advice: str = _ELSE) -> bytes:
    """The bytes of a file. Raises UserError with this advice if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{unreadable(path, error)}; {advice}") from None


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if there is none."""
    try:
        values = json.loads(content(path))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object; {_KIND}")
    return values
