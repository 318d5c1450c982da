"""The model card (README.md) of an exported folder or a run: what the model is, its scores, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt_train import __version__
from nmt_train.common.metric import METRICS, metric_of
from nmt_train.common.plural import counted
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model_formats import MARIAN_CONFIG, MARIAN_MODEL, SENTENCEPIECE, SENTENCEPIECE_PAIR
from nmt_train.run import checkpoint
from nmt_train.run.folder import run_of
from nmt_train.run.log import validations


@dataclass(frozen=True)
class Origin:
    """Where an exported model comes from.

    facts: `checkpoint.json` of its checkpoint. averaged: the number of checkpoints that were averaged. scores: the validation
    event of the checkpoint, or None.
    """

    facts: Mapping[str, Any]
    averaged: int
    scores: Mapping[str, Any] | None


def huggingface(origin: Origin, config: ModelConfig, needs_5: bool) -> str:
    version = "5 or newer (version 4 would use wrong source embeddings)" if needs_5 else "4.57 or newer"
    return f"""---
library_name: transformers
pipeline_tag: translation
license: unknown  # fill in the license and the languages
---
{_about(origin, config)}
## Use

Needs transformers {version}, but no custom code.

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
batch = tokenizer(["A dog runs."], return_tensors="pt", padding=True, truncation=True, return_token_type_ids=False)
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))
```

Remove the names of special pieces, such as `</s>`, from your texts: the tokenizer would read them as special pieces.
Leave out empty texts: the model would invent a sentence. Texts of more than 2,048 pieces are cut.
"""


def ctranslate2(
    origin: Origin,
    config: ModelConfig,
    search: SearchConfig,
    quantize: str | None,
    special: tuple[str, ...],
    pair: bool,
    languages: Sequence[str] = (),
) -> str:
    """special: the pieces that no translation contains. pair: whether source and target have separate SentencePiece models.
    languages: the pieces that begin every source and every translation, if there are such pieces.
    """
    source, target = SENTENCEPIECE_PAIR if pair else (SENTENCEPIECE,) * 2
    pieces, prefix = 'source.encode(["A dog runs."], out_type=str)', ""
    if languages:
        pieces = f'[["{languages[0]}", *pieces] for pieces in {pieces}]'
        prefix = f' target_prefix=[["{languages[1]}"]],'
    never = ", ".join(f'["{piece}"]' for piece in special)
    return f"""{_about(origin, config)}
Weights are stored in {quantize or "fp32"}.

## Use

```python
import ctranslate2
import sentencepiece

folder = "."  # this folder
source = sentencepiece.SentencePieceProcessor(model_file=f"{{folder}}/{source}")
target = sentencepiece.SentencePieceProcessor(model_file=f"{{folder}}/{target}")
translator = ctranslate2.Translator(folder, device="auto")
found = translator.translate_batch(
    {pieces},{prefix}
    beam_size={search.beam}, patience=4, length_penalty={search.normalization:g},
    disable_unk=True, suppress_sequences=[{never}],
)
print([target.decode(result.hypotheses[0]) for result in found])
```

Sources are cut at 1,024 pieces and translations at 256, unless `max_input_length` and `max_decoding_length` say otherwise.
"""


def marian(origin: Origin, config: ModelConfig) -> str:
    return f"""{_about(origin, config)}
## Use

With `marian-decoder` of Marian 1.10 or newer, in this folder:

```
echo "A dog runs." | marian-decoder -c {MARIAN_CONFIG} --cpu-threads 1
```

To continue training with `marian`: `--pretrained-model {MARIAN_MODEL}`.
"""


def of_run(last: Path, config: ModelConfig) -> str:
    """The card of a run, about its newest checkpoint."""
    origin = Origin(checkpoint.load(last).facts, 1, scores_of([last]))
    return f"""{_about(origin, config, "written")}
## Use

```
nmt-translate --model {last.parent.parent} < in > out
```
"""


def scores_of(checkpoints: list[Path]) -> Mapping[str, Any] | None:
    """The validation event of the checkpoint's update, or None if the model is an average or was not validated."""
    run = run_of(checkpoints[-1])
    found = validations(run) if run is not None and len(checkpoints) == 1 else []
    update = checkpoints[-1].resolve().name  # checkpoint.json of the best one may have been written some updates later
    return next((event for event in reversed(found) if str(event["update"]) == update), None)


def _about(origin: Origin, config: ModelConfig, verb: str = "exported") -> str:
    facts, corpus = origin.facts, origin.facts["config"]["corpus"]
    progress, history = facts["progress"], facts.get("history", [])
    began = [step.get("init") or step.get("imported") for step in history]
    imported = bool(history and "imported" in history[-1])
    mean = f" It is the mean of {origin.averaged} checkpoints." if origin.averaged > 1 else ""
    lines = [
        "# A translation model trained by nmt_train",
        "",
        f"A {config.norm}-norm transformer with {config.encoder_layers} encoder and {config.decoder_layers} decoder layers of"
        f" width {config.dim}, {_trained(progress, imported)}; {verb} by nmt_train {__version__}.{mean}",
        "",
    ]
    if layer := config.guided_alignment.layer:
        lines.append(f"- word alignments: attention of the first head of decoder layer {layer} to the source")
    if not imported:
        lines.append(f"- training corpus: {_files(corpus['train'])}")
        sets = corpus["valid"] if isinstance(corpus["valid"][0], dict) else [{"files": corpus["valid"]}]
        for number, its in enumerate(sets):
            name = f" {its['name']}" if number else ""
            lines.append(f"- validation set{name}: {_files(its['files'])}")
    lines += [f"- {'imported from' if imported else 'trained from the parameters of'} `{_origin(path)}`" for path in began[:1]]
    scores = {name: value for name, value in (origin.scores or {}).items() if name.partition("@")[0] in METRICS}
    signatures = (origin.scores or {}).get("signatures", {})
    for metric, value in scores.items():
        signature = f" (sacreBLEU signature `{signatures[metric]}`)" if metric in signatures else ""
        kind, _, name = metric.partition("@")
        lines.append(
            f"- {kind} on the validation set{' ' + name if name else ''}: {value:.{metric_of(metric).decimals}f}{signature}"
        )
    if not scores:
        lines.append("- these parameters were not validated; measure them with `nmt-validate`")
    return "\n".join(lines) + "\n"


def _trained(progress: Mapping[str, Any], imported: bool) -> str:
    if imported:
        return "which another program has trained"
    return f"trained for {counted(progress['updates'], 'update')} ({counted(progress['tokens'], 'target piece')})"


def _origin(path: str) -> str:
    """The name of the run that a checkpoint is in, or of the folder itself."""
    return (run_of(Path(path)) or Path(path)).name


def _files(files: Any) -> str:
    """The file names of `corpus.train` or `corpus.valid`, without their folders."""
    if isinstance(files, dict):  # one of several corpora
        return _files(files["files"])
    if isinstance(files, str):
        return f"`{files.rsplit('/', 1)[-1]}`"
    return ", ".join(_files(file) for file in files)
