"""A small model of the real MarianMT class, with random parameters, in a folder as OPUS-MT publishes them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import MarianConfig, MarianMTModel

SIZES = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


def publish(demo: Path, folder: Path, **changes: Any) -> Path:
    """A folder as OPUS-MT publishes them: </s> is piece 0, <unk> 1, and <pad> the last; two SentencePiece models."""
    folder.mkdir()
    pieces: dict[str, None] = {}
    for side, language in (("source", "en"), ("target", "de")):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            input=str(demo / f"train.{language}"), model_writer=model, vocab_size=100, minloglevel=2, bos_id=-1, pad_id=-1
        )
        (folder / f"{side}.spm").write_bytes(model.getvalue())
        trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        pieces |= dict.fromkeys(trained.id_to_piece(i) for i in range(2, len(trained)))
    names = ["</s>", "<unk>", ">>deu<<", *sorted(pieces.keys() - {"</s>", "<unk>"}), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    pad = len(names) - 1
    config = MarianConfig(
        vocab_size=len(names), pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=0, forced_eos_token_id=0,
        scale_embedding=True, **{"activation_function": "swish", **SIZES, **HEADS, **changes},
    )  # fmt: skip
    torch.manual_seed(1)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.get_input_embeddings().weight[pad] = 0
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, pad] = 0
    model.save_pretrained(folder)
    return folder
