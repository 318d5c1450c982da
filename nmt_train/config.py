"""The whole configuration: defaults, then YAML files, then `--section.key value`; checked by pydantic before anything runs.

Each section's dataclass is in the package that it configures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from nmt_train.codec.config import DroppingConfig, ThresholdConfig, TileConfig
from nmt_train.common.duration import Duration
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.section import STRICT, problem
from nmt_train.common.unknown_key import unknown
from nmt_train.common.yaml_file import flatten, merge, override, read
from nmt_train.corpus import BatchConfig, CorpusConfig
from nmt_train.model import SEPARATE, ModelConfig
from nmt_train.model.metrics import ValidationConfig
from nmt_train.open_keys import AUTO, OPEN, without_auto
from nmt_train.optim.config import OptimizerConfig
from nmt_train.run.checkpoint import CheckpointConfig
from nmt_train.run.log import LogConfig
from nmt_train.run.stopping import StopConfig
from nmt_train.strategy.config import (
    LocalConfig,
    LowBitConfig,
    LowRankConfig,
    OverlapConfig,
    PeersConfig,
    PipelineConfig,
    RecoveryConfig,
    ReplicasConfig,
    ServerConfig,
)
from nmt_train.transport import TransportConfig


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Config:
    """Everything that determines a run."""

    run: str = Field(
        default="run",
        min_length=1,
        description="folder for everything that the run writes; paths are relative to the working directory",
    )
    init: str | None = Field(
        default=None,
        description="a new run begins with the parameters and the vocabulary of this run, checkpoint or imported model, for"
        " fine-tuning, and with what section model does not give; the optimizer, the counters and the data order start fresh",
    )
    seed: int = Field(default=1, ge=0, lt=2**63, description="random seed of initial parameters, data order and dropout")
    mode: str | None = Field(
        default=None,
        description="how workers exchange gradients; auto: measure the machines, and choose; null: single on one device, sync"
        " on several",
    )
    devices: str | list[int] = Field(
        default="auto",
        description="auto (a GPU if there is one, else the CPU), cpu, cuda, all (one rank per GPU), GPU numbers as [0, 1] (one"
        " rank each), cpu x N (N ranks share the CPU) or cuda x N (N ranks share GPU 0)",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="CPU threads of each rank; 0: OMP_NUM_THREADS, else a share of the cores of the machine or container",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="number format: fp32 (on a GPU, TF32 for matrix products), bf16 (layers; parameters, their updates and the"
        " gradient's sum stay fp32), or auto (bf16 if a step is faster with it on this device, measured at the start)",
    )
    compile: bool = Field(
        default=False, description="use torch.compile for the model: the start takes minutes, then steps are faster on a GPU"
    )
    trace: bool = Field(
        default=False, description="record the times of forward, backward, update and transfers, in the folder trace of the run"
    )
    corpus: CorpusConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    local: LocalConfig = Field(default_factory=LocalConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    peers: PeersConfig = Field(default_factory=PeersConfig)
    dropping: DroppingConfig = Field(default_factory=DroppingConfig)
    threshold: ThresholdConfig = Field(default_factory=ThresholdConfig)
    tiles: TileConfig = Field(default_factory=TileConfig)
    low_rank: LowRankConfig = Field(default_factory=LowRankConfig)
    low_bit: LowBitConfig = Field(default_factory=LowBitConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    stop: StopConfig
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    # Names of keys of OPEN that are `auto`, and of keys that an undecided preset, or the model that init names, sets: until the
    # start has decided them, each has the value that it has on a CPU.
    undecided: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_patience(self) -> Config:
        uses = {"stop.patience": self.stop.patience, "validation.command": self.validation.command}
        for key in (key for key, used in uses.items() if used and self.validation.every is None):
            raise ValueError(f"{key} needs validations, but validation.every is null; set it, or remove {key}")
        return self

    @model_validator(mode="after")
    def _check_measured(self) -> Config:
        measured = self.validation.names(self.corpus.validation_sets)
        on = self.stop.patience_on
        wrong = [name for name in on if name not in measured and (name not in ("any", "all") or len(on) > 1)]
        if wrong:
            raise ValueError(f"stop.patience_on should be any, all, or some of {', '.join(measured)}, not {wrong[0]!r}")
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Config:
        if self.model.lora_rank is not None and self.init is None:
            raise ValueError("model.lora_rank trains only factors beside the parameters of a model; name that model as init")
        return self

    @model_validator(mode="after")
    def _check_tied(self) -> Config:
        if self.model.tied == "all" and self.corpus.vocabulary.separate and "model.tied" not in self.undecided:
            raise ValueError(f"model.tied {SEPARATE}")
        return self

    @model_validator(mode="after")
    def _check_guided_alignment(self) -> Config:
        guided, layers = self.model.guided_alignment, self.model.decoder_layers
        aligned = self.corpus.aligned
        if aligned and guided.layer is None and "model.guided_alignment.layer" not in self.undecided:
            raise ValueError(
                "corpus.train has alignments, but no attention head learns them; set model.guided_alignment.layer (the last"
                " decoder layer but one is usual), or remove them"
            )
        weight = 0 if "model.guided_alignment.weight" in self.undecided else guided.weight
        if guided.layer is not None and weight and not aligned:
            raise ValueError(
                "model.guided_alignment.layer needs a corpus with alignments (docs/corpora.md); give them, or set"
                " model.guided_alignment.weight: 0"
            )
        if guided.layer is not None and guided.layer > layers and "model.decoder_layers" not in self.undecided:
            raise ValueError(f"model.guided_alignment.layer {guided.layer} is not one of the {layers} decoder layers; lower it")
        return self

    @model_validator(mode="after")
    def _check_decay(self) -> Config:
        optimizer = self.optimizer
        if optimizer.cosine_until is not None and optimizer.schedule != "cosine":
            raise ValueError("optimizer.cosine_until needs schedule cosine; set optimizer.schedule: cosine, or remove it")
        if optimizer.minimum > optimizer.learning_rate and "optimizer.learning_rate" not in self.undecided:
            rates = f"{optimizer.minimum:g}, above optimizer.learning_rate {optimizer.learning_rate:g}"
            raise ValueError(f"optimizer.minimum is {rates}; lower it")
        until = optimizer.cosine_until or self.stop.countable
        if optimizer.schedule == "cosine" and (until is None or not until.counts):
            raise ValueError(
                "optimizer.cosine_until must be a number of epochs, tokens or updates, not a time; set it, as in 20e"
            )
        return self


_SECTIONS = TypeAdapter(Config)


@dataclasses.dataclass(frozen=True)
class Key:
    """One leaf of the configuration; `name` is its dotted path."""

    name: str
    type: str
    default: Any
    required: bool
    description: str


def entries(section: Any = Config, prefix: str = "") -> Iterator[Key | str]:
    """Yield every leaf in order of appearance; before the leaves of a section, yield the string `name: description`."""
    for name, info in section.__pydantic_fields__.items():
        if name == "undecided":
            continue
        if dataclasses.is_dataclass(info.annotation) and info.annotation is not Duration:
            yield f"{prefix}{name}: {' '.join((info.annotation.__doc__ or '').split())}"
            yield from entries(info.annotation, f"{prefix}{name}.")
        else:
            default = AUTO if prefix + name in OPEN else info.get_default(call_default_factory=True)
            shown = str(info.annotation).replace("nmt_train.common.duration.", "")
            yield Key(prefix + name, shown, default, info.is_required(), info.description or "")


def leaves() -> dict[str, Key]:
    return {key.name: key for key in entries() if isinstance(key, Key)}


# Texts that may contain YAML's special characters: a shell command, and paths.
_LITERAL = ("validation.command", "run", "init", "corpus.cache", _PATH := "corpus.vocabulary.path")


def load(files: Sequence[str], overrides: Mapping[str, str]) -> Config:
    """Load the configuration: later files override earlier ones, and `overrides` override all files.

    overrides: maps dotted keys to YAML texts from the command line. A UserError names the key and its place (the file and
    line, or the command line); for an unknown key, it also names the nearest known key.
    """
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for file in files:
        merge(values, read(expanded(file), where, "give an existing YAML file to --config"), leaves())
    lists = [_PATH] if overrides.get(_PATH, "").startswith("[") else []  # [source, target]
    override(values, overrides, where, literal={*_LITERAL}.difference(lists))
    return validate(values, where)


def validate(values: dict[str, Any], where: Mapping[str, str]) -> Config:
    """Return the Config for nested `values`; raise UserError for the first key that is unknown, missing or invalid.

    where: maps dotted keys to the file and line that set them, for error messages.
    """
    known = leaves()
    for name in flatten(values):
        if name not in known and not any(name.startswith(key + ".") for key in known):
            raise UserError(f"{where.get(name, 'config')}: {unknown(name, known)}")
    values, undecided = without_auto(_tied(values), where, known)
    try:
        return _SECTIONS.validate_python({**values, "undecided": undecided})
    except ValidationError as error:
        wrong = problem(error)
        kind, path, text = wrong.kind, wrong.path, wrong.text
        if not path:  # several keys contradict each other; the text begins with the first
            raise UserError(f"{where.get(text.split()[0], 'config')}: {text}") from None
        name = next((".".join(path[:n]) for n in range(len(path), 0, -1) if ".".join(path[:n]) in known), ".".join(path))
        subject, keys = name, [f"{name}.{text.split()[0]}", name]  # texts about keys of a section begin with one of them
        within = path[name.count(".") + 1 :]  # where in the value of the key
        if several := within[:1] == ["entry"]:  # the mistake is in one of several corpora
            _, number, *inner = within
            subject = ": ".join(filter(None, [name, f"corpus {int(number) + 1}", ".".join(inner)]))
            keys = [".".join([name, number, *inner]), f"{name}.{number}", name]
        place = next((where[key] for key in (*keys, *where) if key in where and key.startswith(name)), "config")
        if kind == "missing":
            file = next(iter(where.values()), "config").split(",")[0]
            raise UserError(f"{place if several else file}: {subject} is missing; set it") from None
        more = ", or auto" if name in OPEN else ""
        raise UserError(f"{place}: {subject}: {wrong.what}{more}{wrong.value}; see nmt-train --help") from None


def _tied(values: dict[str, Any]) -> dict[str, Any]:
    """The values; embeddings of separate vocabularies, with lists as `size` or `path`, are not tied unless that is given."""
    corpus, model = values.get("corpus"), values.get("model", {})
    vocabulary = corpus.get("vocabulary") if isinstance(corpus, dict) else None
    separate = isinstance(vocabulary, dict) and any(isinstance(vocabulary.get(key), list) for key in ("size", "path"))
    separate = separate and values.get("init") is None
    return {**values, "model": {"tied": "target-output", **model}} if separate and isinstance(model, dict) else values


def with_values(config: Config, given: Mapping[str, Any]) -> Config:
    """The configuration with other values, by dotted keys; UserError if one is not valid."""
    values = plain(config)
    for name, value in given.items():
        section, key = _place(values, name)
        section[key] = value
    return validate(values, {})


def _place(values: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The section that has a dotted key, in nested values, and the last part of the key."""
    *sections, key = name.split(".")
    for section in sections:
        values = values[section]
    return values, key


def plain(config: Any) -> dict[str, Any]:
    """Convert the configuration to nested dictionaries of YAML types; `validate` reads them back."""
    result: dict[str, Any] = _SECTIONS.dump_python(config, mode="json")
    for name in result.pop("undecided"):
        section, key = _place(result, name)
        if name in OPEN:
            section[key] = AUTO
        else:
            del section[key]
    return result
