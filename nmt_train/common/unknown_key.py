"""What to say about a key that the configuration does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# By the key to use here, names that Marian, OpenNMT, fairseq and Hugging Face have for it; - and _ are equal in them.
_OTHER_NAMES = {
    "run": "save-model save-dir output-dir",
    "devices": "world-size gpu-ranks",
    "mode": "sync-sgd ddp-backend",
    "init": "reset-optim pretrained-model train-from finetune-from-model model-name-or-path",
    "corpus.train": "train-sets train-file trainpref",
    "corpus.valid": "valid-sets validation-file validpref",
    "corpus.epoch": "logical-epoch",
    "corpus.vocabulary.path": "vocabs srcdict tokenizer-name src-subword-model",
    "corpus.vocabulary.size": "dim-vocabs vocab-size src-vocab-size",
    "corpus.vocabulary.sampling": "sentencepiece-alphas src-subword-alpha",
    "corpus.vocabulary.character_coverage": "sentencepiece-options",
    "batch.tokens": "mini-batch-words mini-batch-fit max-tokens batch-size batch.size",
    "batch.sentences": "mini-batch per-device-train-batch-size",
    "batch.accumulate": "optimizer-delay accum-count update-freq gradient-accumulation-steps",
    "precision": "fp16 bf16 model-dtype",
    "model.preset": "task arch type encoder-type",
    "model.encoder_layers": "enc-depth enc-layers",
    "model.decoder_layers": "dec-depth dec-layers",
    "model.dim": "dim-emb hidden-size d-model encoder-embed-dim",
    "model.ffn_dim": "transformer-dim-ffn transformer-ff encoder-ffn-dim encoder-ffn-embed-dim",
    "model.heads": "transformer-heads encoder-attention-heads",
    "model.norm": "transformer-preprocess transformer-postprocess encoder-normalize-before",
    "model.tied": "tied-embeddings-all share-embeddings share-decoder-embeddings share-all-embeddings",
    "model.dropout": "transformer-dropout",
    "model.dropout_attention": "transformer-dropout-attention attention-dropout",
    "model.dropout_ffn": "transformer-dropout-ffn activation-dropout",
    "model.dropout_source_words": "dropout-src",
    "model.dropout_target_words": "dropout-trg",
    "model.label_smoothing": "label-smoothing-factor",
    "optimizer.learning_rate": "lr optimizer.lr learn-rate",
    "optimizer.warmup": "lr-warmup warmup-steps warmup-updates",
    "optimizer.schedule": "lr-scheduler lr-scheduler-type decay-method lr-decay-inv-sqrt",
    "optimizer.smoothing": "exponential-smoothing average-decay ema-decay",
    "optimizer.beta1": "optimizer-params adam-betas adam-beta1",
    "optimizer.clip_norm": "max-grad-norm",
    "validation.every": "valid-freq valid-steps eval-steps validate-interval",
    "checkpoint.every": "save-freq save-steps save-checkpoint-steps save-interval-updates",
    "checkpoint.keep": "keep-checkpoint keep-interval-updates save-total-limit",
    "validation.metrics": "valid-metrics compute-metrics eval-bleu",
    "stop.patience": "early-stopping",
    "stop.patience_on": "early-stopping-on early-stopping-criteria best-checkpoint-metric metric-for-best-model",
    "stop.after": "epochs max-epoch max-epochs stop.epochs updates max-update max-updates stop.updates max-steps train-steps"
    " num-train-epochs after-epochs after-batches",
    "log.every": "disp-freq report-every log-interval logging-steps",
    "log.trackers": "tensorboard tensorboard-logdir wandb-project report-to",
}
_KEY_OF = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
_HOW = {
    "stop.after": ", as in 10e, 5000u or 2h",
    "log.trackers": ", as in [tensorboard]",
    "batch.tokens": ", or batch.sentences",
}
# Names that have no single key here, with what to do instead.
_INSTEAD = {
    "log.tensorboard": "write log.trackers: [tensorboard], or nothing in place of false",
    **dict.fromkeys(
        ("corpus.weights", "corpus.weight"),
        "give every corpus its weight: corpus.train: [{files: [a, b], weight: 2}, ...] (docs/corpora.md)",
    ),
    "corpus.alignments": "give them to their corpus: corpus.train: [{files: [a, b], alignments: c}] (docs/corpora.md)",
    **dict.fromkeys(
        ("corpus.test", "test"), "training needs only corpus.valid; test a trained model with nmt-validate RUN --test FILE FILE"
    ),
}


def unknown(name: str, keys: Iterable[str], options: Iterable[str] = ()) -> str:
    """Return the error message for an unknown key; `options` are names that are valid in addition to the dotted `keys`."""
    keys = list(keys)
    known = dict.fromkeys([*keys, *options])
    sections = {key.rsplit(".", 1)[0] for key in keys if "." in key}
    if name in sections:
        return f"{name} is a section; give its keys, as in {next(k for k in keys if k.startswith(name + '.'))}"
    if name in _INSTEAD:
        return f"unknown key {name}; {_INSTEAD[name]}"
    if key := _KEY_OF.get(name.replace("_", "-")):
        return f"unknown key {name}; did you mean {key}{_HOW.get(key, '')}?"
    last = name.rsplit(".", 1)[-1].replace("-", "_")
    same = [key for key in known if key.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near = close or same if "." in name else same or close
    return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "; see nmt-train --help")
