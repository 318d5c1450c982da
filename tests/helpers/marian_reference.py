"""Marian's transformer in numpy, written from its source (src/models/transformer.h), and random models in its format.

One sentence at a time, in float64, with a loop per head: slow, and independent of our model.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import yaml

OPTIONS: dict[str, Any] = {
    "type": "transformer", "enc-depth": 2, "dec-depth": 3, "dim-emb": 16, "transformer-heads": 4, "transformer-dim-ffn": 24,
    "transformer-ffn-activation": "swish", "transformer-ffn-depth": 2, "transformer-preprocess": "",
    "transformer-postprocess": "dan", "transformer-postprocess-top": "", "transformer-postprocess-emb": "d",
    "transformer-decoder-autoreg": "self-attention", "tied-embeddings-all": True, "tied-embeddings": False,
    "tied-embeddings-src": False, "output-omit-bias": False, "lemma-dim-emb": 0, "ulr": None, "version": "v1.12.42",
}  # fmt: skip
PRE_NORM = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}


def train_vocabulary(lines: list[str], path: Path, size: int, **settings: Any) -> Path:
    """A vocabulary with the settings of Marian's own command."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, minloglevel=2, hard_vocab_limit=False,
        **{"bos_id": -1, "eos_id": 0, "unk_id": 1, "pad_id": -1, **settings},
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


def pieces_of(vocabulary: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))


def random_arrays(options: dict[str, Any], source: int, target: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Random parameters of a model with these options and vocabulary sizes, under Marian's names."""
    random, dim, inner = np.random.default_rng(seed), options["dim-emb"], options["transformer-dim-ffn"]
    before, top = "n" in options["transformer-preprocess"], "n" in options["transformer-postprocess-top"]
    arrays: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        arrays[name] = (mean + random.normal(0, 0.3, shape)).astype(np.float32)

    def norm(name: str, suffix: str) -> None:
        add(f"{name}_ln_scale{suffix}", 1, dim, mean=1.0)
        add(f"{name}_ln_bias{suffix}", 1, dim)

    for side, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        for layer in range(1, depth + 1):
            for block in ("self", "context") if side == "decoder" else ("self",):
                for letter in "qkvo":
                    add(f"{side}_l{layer}_{block}_W{letter}", dim, dim)
                    add(f"{side}_l{layer}_{block}_b{letter}", 1, dim)
                norm(f"{side}_l{layer}_{block}_Wo", "_pre" if before else "")
            add(f"{side}_l{layer}_ffn_W1", dim, inner)
            add(f"{side}_l{layer}_ffn_b1", 1, inner)
            add(f"{side}_l{layer}_ffn_W2", inner, dim)
            add(f"{side}_l{layer}_ffn_b2", 1, dim)
            norm(f"{side}_l{layer}_ffn_ffn", "_pre" if before else "")
        if top:
            norm(f"{side}_top", "")
    if options["tied-embeddings-all"] or options["tied-embeddings-src"]:
        add("Wemb", source, dim)
    else:
        add("encoder_Wemb", source, dim)
        add("decoder_Wemb", target, dim)
    if not (options["tied-embeddings-all"] or options["tied-embeddings"]):
        add("decoder_ff_logit_out_Wt", target, dim)
    if not options["output-omit-bias"]:
        add("decoder_ff_logit_out_b", 1, target)
    return arrays


def save(arrays: dict[str, np.ndarray], options: dict[str, Any], path: Path) -> Path:
    text = yaml.safe_dump(options).encode()
    held = np.frombuffer(text + b"\0" * (256 - len(text) % 256), np.int8)
    np.savez(path, **arrays, **{"special:model.yml": held})
    return path


def log_probabilities(
    arrays: dict[str, np.ndarray], options: dict[str, Any], source: list[int], target: list[int]
) -> np.ndarray:
    """Log p (target length, vocabulary) at each place of `target`; both are ids that end with </s>."""
    values = {name: array.astype(np.float64) for name, array in arrays.items()}
    pre, post, top = (
        options[f"transformer-{name}"].replace("d", "") for name in ("preprocess", "postprocess", "postprocess-top")
    )

    def normalize(x: np.ndarray, name: str, suffix: str = "") -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * values[f"{name}_ln_scale{suffix}"] + values[f"{name}_ln_bias{suffix}"]

    def steps(after: str, x: np.ndarray, name: str, before: np.ndarray) -> np.ndarray:
        for step in after:
            x = x + before if step == "a" else normalize(x, name)
        return x

    def affine(x: np.ndarray, name: str, letter: str) -> np.ndarray:
        return x @ values[f"{name}_W{letter}"] + values[f"{name}_b{letter}"]

    def attention(x: np.ndarray, memory: np.ndarray | None, name: str, causal: bool) -> np.ndarray:
        query = normalize(x, f"{name}_Wo", "_pre") if pre else x
        memory = query if memory is None else memory
        width = options["dim-emb"] // options["transformer-heads"]
        heads = []
        for head in range(options["transformer-heads"]):
            part = slice(head * width, (head + 1) * width)
            q, k, v = (affine(y, name, letter)[:, part] for y, letter in ((query, "q"), (memory, "k"), (memory, "v")))
            scores = q @ k.T / np.sqrt(width)
            if causal:
                scores = np.where(np.tri(len(x), dtype=bool), scores, -99999999.0)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v)
        return steps(post, affine(np.concatenate(heads, -1), name, "o"), f"{name}_Wo", x)

    def feed_forward(x: np.ndarray, name: str) -> np.ndarray:
        inner = affine(normalize(x, f"{name}_ffn", "_pre") if pre else x, name, "1")
        swish = options["transformer-ffn-activation"] == "swish"
        inner = inner / (1 + np.exp(-inner)) if swish else np.maximum(inner, 0)
        return steps(post, affine(inner, name, "2"), f"{name}_ffn", x)

    def embed(vectors: np.ndarray) -> np.ndarray:
        dim = options["dim-emb"]
        rates = np.exp(-np.log(10000) / (dim / 2 - 1) * np.arange(dim // 2))
        angles = np.arange(len(vectors))[:, None] * rates
        return np.sqrt(dim) * vectors + np.concatenate([np.sin(angles), np.cos(angles)], -1)

    shared = "Wemb" in values
    x = first = embed(values["Wemb" if shared else "encoder_Wemb"][source])
    for layer in range(1, options["enc-depth"] + 1):
        x = attention(x, None, f"encoder_l{layer}_self", causal=False)
        x = feed_forward(x, f"encoder_l{layer}_ffn")
    memory = steps(top, x, "encoder_top", first)
    embedding = values["Wemb" if shared else "decoder_Wemb"]
    x = first = embed(np.concatenate([np.zeros((1, embedding.shape[1])), embedding[target[:-1]]]))
    for layer in range(1, options["dec-depth"] + 1):
        x = attention(x, None, f"decoder_l{layer}_self", causal=True)
        x = attention(x, memory, f"decoder_l{layer}_context", causal=False)
        x = feed_forward(x, f"decoder_l{layer}_ffn")
    x = steps(top, x, "decoder_top", first)
    logits = x @ values.get("decoder_ff_logit_out_Wt", embedding).T + values.get("decoder_ff_logit_out_b", 0.0)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def score(arrays: dict[str, np.ndarray], options: dict[str, Any], source: list[int], target: list[int]) -> float:
    """Log p of `target`, as marian-scorer prints it."""
    return float(log_probabilities(arrays, options, source, target)[np.arange(len(target)), target].sum())
