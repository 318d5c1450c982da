"""Reads and writes models of Marian: a .npz file with Marian's options in it, and one or two SentencePiece vocabularies.

The transformer of Marian (src/models/transformer.h of marian-dev) is ours with `model.conventions: marian`. Its matrices are
transposed, its biases are rows, and its vocabularies lack our pieces PAD and BEGIN: imported models get zero embeddings for
them, and exported ones leave them out.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from nmt_train.common.errors import UserError, unreadable
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import MARIAN_CONFIG, MARIAN_MODEL, marian_options, marian_vocabulary
from nmt_train.model_formats.marian_options import SPECIAL

VOCABULARY, VOCABULARY_PAIR = ("vocab.spm",), ("source.spm", "target.spm")
_UNSEEN = -20.0  # the output bias of pieces that the target never has: a very low logit, which training can change
# Our names of the linear layers; Marian's name of the block, and the letters of the matrices that we store as one.
_ENCODER = {
    "attention.query_key_value": ("self", "qkv"),
    "attention.output": ("self", "o"),
    "ffn.inner": ("ffn", "1"),
    "ffn.outer": ("ffn", "2"),
}
_DECODER = _ENCODER | {
    "cross.query": ("context", "q"),
    "cross.key_value": ("context", "kv"),
    "cross.output": ("context", "o"),
}
_ENCODER_NORMS = {"attention_residual.norm": "self_Wo", "ffn_residual.norm": "ffn_ffn"}
_DECODER_NORMS = _ENCODER_NORMS | {"cross_residual.norm": "context_Wo"}
_SIDES = (("encoder", _ENCODER, _ENCODER_NORMS), ("decoder", _DECODER, _DECODER_NORMS))
_OUTPUT, _EARLIER_OUTPUT = "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W"  # the earlier one is not transposed
_BIAS = "decoder_ff_logit_out_b"


def read(path: Path, vocabularies: Sequence[Path]) -> tuple[ModelConfig, Vocabulary, dict[str, Tensor]]:
    """Read a model of Marian; return its configuration, its vocabulary and its parameters under our names.

    vocabularies: one .spm file for both sides, or the source's and the target's. Raises UserError if a file is missing or
    damaged, or if the model has something that ours lack.
    """
    arrays = _arrays(path)
    options = marian_options.parse(arrays.pop(SPECIAL, None), str(path))
    config = marian_options.to_config(options, str(path))
    vocabulary, source, target = marian_vocabulary.read(vocabularies)
    one_source = bool(options["tied-embeddings-src"])
    if len(vocabulary.models) == 2 and (config.tied == "all" or one_source):
        raise UserError(f"{path}: both sides share their embeddings; give --vocab one vocabulary for both")
    if _EARLIER_OUTPUT in arrays:
        arrays[_OUTPUT] = arrays.pop(_EARLIER_OUTPUT).T
    embeddings = _embeddings(config, one_source)
    known = {name for _, theirs, _ in _layers(config) for name in theirs} | {*embeddings.values()}
    if others := arrays.keys() - known - ({_BIAS} if config.output_bias else set()):
        raise UserError(f"{path}: parameter {min(others)} is not of a transformer as nmt_train has it; it cannot be read")
    found: dict[str, Tensor] = {}
    try:
        for ours, theirs, linear in _layers(config):
            parts = [arrays[name].transpose(1, 0) if linear else arrays[name].flatten() for name in theirs]
            found[ours] = torch.from_numpy(np.concatenate(parts))
        for ours, name in embeddings.items():
            found[ours] = _reordered(arrays[name], source if ours == "source_embedding" else target, path, vocabularies)
        if config.output_bias:
            found["output_bias"] = _reordered(arrays[_BIAS].reshape(-1, 1), target, path, vocabularies).flatten()
            found["output_bias"][torch.tensor(target) < 0] = _UNSEEN
    except KeyError as error:
        raise UserError(f"{path}: parameter {error.args[0]} is missing; copy the file again") from None
    except (RuntimeError, TypeError, ValueError):
        raise UserError(f"{path}: a parameter does not have the shape that its options say; copy the file again") from None
    _compare(found, config, vocabulary, path)
    return config, vocabulary, found


def write(model: Transformer, vocabulary: Vocabulary, search: SearchConfig, folder: Path) -> None:
    """Write the model, its vocabulary and a configuration of marian-decoder into an existing folder: the reverse of `read`.

    Raises UserError if Marian cannot represent the model.
    """
    config = model.config
    if config.conventions != "marian":
        raise UserError(
            "--to marian: Marian has other sinusoids and another first input of the decoder than this model; train with"
            " model.norm: post and model.conventions: marian"
        )
    if config.norm == "pre":  # LayerAttention of Marian 1.12 normalizes keys and values only if all words are computed at once
        raise UserError(
            "--to marian: marian-decoder would translate wrongly, since it does not normalize the earlier words in the"
            " self-attention of a pre-norm decoder; train with model.norm: post, or export to ctranslate2"
        )
    sides = marian_vocabulary.written(vocabulary)
    names = VOCABULARY if len(sides) == 1 else VOCABULARY_PAIR
    for name, (content, _) in zip(names, sides, strict=True):
        (folder / name).write_bytes(content)
    source, target = (torch.tensor(order) for order in (sides[0][1], sides[-1][1]))
    parameters = {name: parameter.detach().cpu().float() for name, parameter in model.named_parameters()}
    arrays = {SPECIAL: marian_options.from_config(config, [len(source), len(target)])}
    for ours, theirs, linear in _layers(config):
        for name, part in zip(theirs, parameters[ours].chunk(len(theirs)), strict=True):
            arrays[name] = (part.T if linear else part[None]).contiguous().numpy()
    for ours, name in _embeddings(config).items():
        arrays[name] = parameters[ours][source if ours == "source_embedding" else target].numpy()
    if config.output_bias:
        arrays[_BIAS] = parameters["output_bias"][target][None].numpy()
    _save(arrays, folder / MARIAN_MODEL)
    settings = {
        "relative-paths": True, "models": [MARIAN_MODEL], "vocabs": [names[0], names[-1]], "beam-size": search.beam,
        "normalize": search.normalization, "mini-batch": 16, "maxi-batch": 100, "maxi-batch-sort": "src",
    }  # fmt: skip
    (folder / MARIAN_CONFIG).write_text(yaml.safe_dump(settings), encoding="utf-8")


def _layers(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield our name and Marian's names of each parameter of the layers, and whether it is the matrix of a linear layer."""
    before = "_pre" if config.norm == "pre" else ""
    for (side, linear, norms), number in zip(_SIDES, (config.encoder_layers, config.decoder_layers), strict=True):
        for layer in range(number):
            ours, theirs = f"{side}.{layer}", f"{side}_l{layer + 1}"
            for name, (block, letters) in linear.items():
                yield f"{ours}.{name}.weight", tuple(f"{theirs}_{block}_W{letter}" for letter in letters), True
                yield f"{ours}.{name}.bias", tuple(f"{theirs}_{block}_b{letter}" for letter in letters), False
            for name, block in norms.items():
                yield f"{ours}.{name}.weight", (f"{theirs}_{block}_ln_scale{before}",), False
                yield f"{ours}.{name}.bias", (f"{theirs}_{block}_ln_bias{before}",), False
        if config.norm == "pre":
            yield f"{side}_norm.weight", (f"{side}_top_ln_scale",), False
            yield f"{side}_norm.bias", (f"{side}_top_ln_bias",), False


def _embeddings(config: ModelConfig, one_source: bool = False) -> dict[str, str]:
    """Marian's name of each of our embeddings. one_source: whether the inputs of both sides share one (tied-embeddings-src)."""
    if config.tied == "all":
        return {"target_embedding": "Wemb"}
    source, target = ("Wemb", "Wemb") if one_source else ("encoder_Wemb", "decoder_Wemb")
    names = {"source_embedding": source, "target_embedding": target}
    return names | ({"output_embedding": _OUTPUT} if config.tied == "none" else {})


def _reordered(array: np.ndarray, order: list[int], path: Path, vocabularies: Sequence[Path]) -> Tensor:
    """The rows of `array` (pieces, ...) with Marian's ids `order`; zeros for -1."""
    if len(array) != max(order) + 1:
        names = " and ".join(map(str, vocabularies))
        raise UserError(
            f"{path}: has embeddings of {len(array):,} pieces, but {names} {max(order) + 1:,} pieces; give the vocabulary that"
            " the model was trained with"
        )
    return torch.cat([torch.from_numpy(array), torch.zeros(1, *array.shape[1:])])[order]


def _compare(found: Mapping[str, Tensor], config: ModelConfig, vocabulary: Vocabulary, path: Path) -> None:
    """Raise UserError if the parameters do not have the sizes that the options give."""
    with torch.device("meta"):
        wanted = Transformer(config, vocabulary.size).named_parameters()
    for name, parameter in wanted:
        if found[name].shape != parameter.shape:
            shape, said = tuple(found[name].shape), tuple(parameter.shape)
            raise UserError(f"{path}: parameter {name} has the shape {shape}, not {said} as its options say; copy it again")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file; numbers as fp32."""
    if path.suffix != ".npz":
        raise UserError(f"{path}: not a .npz file, which --vocab is for; give the .npz file that Marian has saved")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise UserError(f"{unreadable(path, error)}; give a model of Marian") from None
    except Exception as error:  # numpy and zipfile have a dozen kinds for files that are damaged or of other kinds
        raise UserError(f"{path}: not a .npz file, or damaged ({type(error).__name__}); copy it again") from None
    for name, array in arrays.items():
        if name != SPECIAL and array.dtype.kind != "f":
            raise UserError(f"{path}: parameter {name} is quantized; give the model from before its conversion")
    return {name: array if name == SPECIAL else array.astype(np.float32) for name, array in arrays.items()}


def _save(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a .npz file as Marian's reader needs it: not compressed, and without the extensions for large files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, array in arrays.items():
            content = BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0))
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
