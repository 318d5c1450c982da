"""Small models of the real M2M100 class, as M2M100 and NLLB are published: their files, their tokenizers, random parameters."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from published import HEADS, SIZES
from torch import Tensor
from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer, NllbTokenizer

OF_NLLB = ["ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]
PAIRS = {"m2m100": ("en", "de"), "nllb": ("eng_Latn", "deu_Latn")}
SPM = "sentencepiece.bpe.model"


def publish(demo: Path, folder: Path, kind: str, lacking: Sequence[str] = (), **changes: Any) -> Path:
    """kind: m2m100 or nllb. lacking: pieces of the SentencePiece model without ids in M2M100. changes: of the configuration."""
    folder.mkdir()
    model = io.BytesIO()
    lines = [line for language in ("en", "de") for line in (demo / f"train.{language}").read_text(encoding="utf-8").split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=150, model_type="bpe", minloglevel=2
    )
    (folder / SPM).write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = [pieces.id_to_piece(number) for number in range(3, len(pieces))]
    if kind == "m2m100":
        table = ["<s>", "<pad>", "</s>", "<unk>", *sorted({*names, "漢"} - {*lacking})]  # "漢": not a piece of the model
        (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(table)}), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "M2M100Tokenizer"}))
        rows = len(table) + 100 + 8
    else:
        made = NllbTokenizer.convert_to_native_format(vocab_file=str(folder / SPM))
        made = {key: made[key] for key in ("vocab", "merges", "_spm_precompiled_charsmap")}
        tokens = NllbTokenizer(**made, extra_special_tokens=OF_NLLB)
        shutil.rmtree(folder)
        tokens.save_pretrained(folder)
        (folder / SPM).write_bytes(model.getvalue())
        rows = len(tokens) + 2
    config = M2M100Config(vocab_size=rows, **{**SIZES, **HEADS, "max_position_embeddings": 64, **changes})
    torch.manual_seed(1)
    network = M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return folder


class Published:
    """The real package's model and tokenizer in such a folder, for one pair of languages."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.model = M2M100ForConditionalGeneration.from_pretrained(folder)
        source, target = PAIRS[kind]
        if kind == "m2m100":
            self.tokens: Any = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / SPM), src_lang=source, tgt_lang=target)
            ids = self.tokens.get_lang_id
        else:
            self.tokens = NllbTokenizer.from_pretrained(folder, src_lang=source, tgt_lang=target)
            ids = self.tokens.convert_tokens_to_ids
        self.language, self.begin = ids(source), ids(target)

    def batch(self, sources: list[str], targets: list[str]) -> dict[str, Tensor]:
        """With labels: the piece of the language, the text, </s>."""
        return dict(self.tokens(sources, text_target=targets, return_tensors="pt", padding=True))

    def logs(self, sources: list[str], targets: list[str]) -> list[Tensor]:
        """The log-probabilities of all pieces at each place of the targets (their length + 1, vocabulary)."""
        batch = self.batch(sources, targets)
        with torch.inference_mode():
            logs = self.model(**batch).logits.log_softmax(-1)
        lengths = (batch["labels"] != self.tokens.pad_token_id).sum(1)
        return [row[1:length] for row, length in zip(logs, lengths, strict=True)]  # the first place is that of the language

    def teach(self, pairs: Sequence[tuple[str, str]], steps: int) -> None:
        """Train it until its translations end by themselves."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.005)
        self.model.train()
        batches = [self.batch(*map(list, zip(*pairs[start : start + 50], strict=True))) for start in range(0, len(pairs), 50)]
        for step in range(steps):
            batch = dict(batches[step % len(batches)])
            batch["labels"] = batch["labels"].masked_fill(batch["labels"] == self.tokens.pad_token_id, -100)
            optimizer.zero_grad()
            self.model(**batch).loss.backward()
            optimizer.step()
        self.model.eval()

    def translate(self, sources: list[str], beam: int) -> list[str]:
        batch = self.tokens(sources, return_tensors="pt", padding=True)
        found = self.model.generate(
            **batch, forced_bos_token_id=self.begin, num_beams=beam, length_penalty=0.0, max_new_tokens=60, do_sample=False,
            suppress_tokens=[self.tokens.pad_token_id, self.tokens.unk_token_id],
        )  # fmt: skip
        assert (found == self.tokens.eos_token_id).sum(1).min() == 2, "all translations end"
        return [self.text(ids) for ids in found.tolist()]

    def text(self, ids: list[int]) -> str:
        special = {*range(4), self.language, self.begin}
        return str(self.tokens.decode([number for number in ids if number not in special], skip_special_tokens=True))
