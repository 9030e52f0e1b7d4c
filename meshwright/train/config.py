"""The schema of a run file: one pydantic model per TOML section, one field per option.

Each field is declared once. Its type is the check, and the string below it is its description: docs/train-config.md,
examples/meshwright.schema.json and `--set` are made from these (`config_docs.py`). Options of how a model is run
(memory, pipeline, context parallelism) are declared in `recipe.py` and become fields by `section_from`.

Models are strict: TOML has types, so a quoted number is a mistake and is never converted.
"""

from __future__ import annotations

import datetime
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel, Field, JsonValue, model_validator
from pydantic.fields import FieldInfo

from ..objectives import OBJECTIVES, Objective
from ..recipe import ContextParallel, Lora, MemoryOptions, Pipeline, Recipe
from .config_objectives import (
    ClassifySection,
    DistillSection,
    DpoSection,
    EmbeddingSection,
    OrpoSection,
    RerankSection,
    RewardSection,
    SimpoSection,
)
from .config_section import (
    FIXED,
    FREE,
    Beta,
    CheckpointPath,
    Fraction,
    OnlyFalse,
    Positive,
    Section,
    section_from,
)

WARM_UP = 2  # steps before a trace starts: memory grows, kernels are chosen and layers compile during them


class MeshSection(Section):
    """The number of ranks on each mesh axis. Their product, without ep, is the number of processes."""

    replicate: Positive = 1
    """Copies of the model (DDP, HSDP), each with its own data."""
    fsdp: Positive = 1
    """Ranks that shard the parameters of a copy (FSDP2, ZeRO-3), each with its own data."""
    tp: Positive = 1
    """Tensor parallel: ranks that split every layer and work on the same data."""
    ep: Positive = 1
    """Expert parallel: ranks that divide the experts among them, out of the ranks of fsdp x cp x tp."""
    cp: Positive = 1
    """Context parallel: ranks that split the tokens of a stream, for long documents; they work on the same data."""
    pp: Positive = 1
    """Pipeline parallel: ranks that hold consecutive layers (stages). They work on the same data."""

    @property
    def num_data_ranks(self) -> int:
        """The data-parallel size: ranks of cp, tp and pp read the same batches."""
        return self.replicate * self.fsdp

    @property
    def world(self) -> int:
        """The world size. Experts reuse the ranks of fsdp x cp x tp, so ep does not multiply it."""
        return self.pp * self.num_data_ranks * self.cp * self.tp


class ContextSection(section_from(ContextParallel)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Context parallelism: how layers exchange tokens over cp; docs/long-contexts.md compares the costs."""


class PipelineSection(section_from(Pipeline)):  # type: ignore[misc]  # the fields are those of the dataclass
    """The pipeline schedule and its stages, for meshes with pp."""


class LoraSection(section_from(Lora, but={"dropout", "b_std"})):  # type: ignore[misc]  # the fields are those of the dataclass
    """Low-rank adapters instead of all weights; docs/lora.md says when and with which rank and learning rate."""


class ImagesSection(Section):
    """Limits and paths of images and videos in chats, for `tower = true`."""

    root: Annotated[str, FREE] = ""
    """The directory that relative paths start from; by default the directory of the data."""
    max_pixels: Positive | None = None
    """Larger images are scaled down to this; 1024 pixels make one token. By default the limit of the processor."""
    max_video_pixels: Positive | None = None
    """The limit for all frames of a video together; 2048 pixels make one token."""
    fps: Annotated[float, Field(gt=0)] | None = None
    """Frames sampled per second of a video; by default the rate of the processor, usually 2."""


class SourceSection(Section):
    """The source of documents, and which of their tokens are trained on."""

    path: Annotated[str | list[str], FREE]
    """A file (.jsonl, .parquet, .txt, .md, or a .json that is a list of rows), a directory of them (without .json), a
    Hugging Face data set (a hub id, or a directory that save_to_disk has written), or a list of these."""
    hf_subset: Annotated[str, FREE] = ""
    """The subset (configuration) to load, for a hub id or a directory with the layout of one."""
    hf_split: Annotated[str, FREE] = ""
    """The split of a Hugging Face data set, such as "train"; needed if it has several."""
    hf_revision: Annotated[str, FREE] = ""
    """The branch, tag or commit of a hub id; by default the newest."""
    kind: Literal["chat", "text", "tokens"] = "chat"
    """chat: messages, trained on the assistant's. text: trained on every token. tokens: rows of token ids."""
    name: str = ""
    """The name of the source in messages and metrics; by default its path."""
    fields: dict[str, str] = {}
    """Column names: standard name = name in the rows, such as {messages = "dialog"}."""
    thinking: Literal["auto"] | bool = "auto"
    """Enable thinking in prompts; "auto": for the turns that think."""
    turns: Literal["each", "last", "joined"] = "each"
    """The assistant turns to train on. "joined" renders a chat once, with the generation marks of its template."""
    template: Annotated[str, FREE] = ""
    """A file with a chat template, to replace the tokenizer's."""
    template_args: dict[str, JsonValue] = {}
    """Further arguments of the chat template."""
    split: Literal["file", "paragraph", "line"] = "file"
    """The unit that makes a document in a .txt or .md."""
    images: ImagesSection = ImagesSection()
    too_long: Literal["stop", "drop", "cut"] | None = None
    """Treatment of documents longer than a stream: stop the run (the default for chats), drop them, or cut them (the
    default for texts). `meshwright data` counts dropped ones."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Treatment of rows that cannot be used: stop the run before it starts, or skip and count them. Either way a
    file next to the cache lists each."""


class DataSection(SourceSection):
    """A source of documents."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the source per epoch; 0.5 takes a different half each time. A weight too small for a single document
    is refused."""
    share: Fraction | None = None
    """The share of all tokens, instead of a weight. Set it for all sources or for none, and not with epochs."""


class LengthSection(Section):
    """The part of `[train]` that is not made from options: sizes, the end of the run, the dtype."""

    length: Annotated[int, Field(ge=2), FIXED] = 8192
    """Tokens of a packed stream (sequence length). A stream is a micro-batch of a data rank."""
    tokens_per_step: Annotated[Positive | None, FIXED] = None
    """Global batch size in tokens, with padding; determines the number of micro-batches. By default 32 streams."""
    steps: Positive | None = None
    """The number of steps. Alternatives are `epochs` and `tokens`; by default one epoch."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """The number of passes over the data."""
    tokens: str | Positive | None = None
    """The number of tokens, optionally with K, M, B or T: "2B"."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """The compute dtype of matmuls. Trained weights and optimizer state are float32, or float64 with "float64"."""


_BY_HAND = {
    "head",
    "dtype",
    "memory",
    "pipeline",
    "context",
    "lora",
    "labels",
}  # fields of Recipe that `section_from` leaves out


class TrainSection(section_from(MemoryOptions, section_from(Recipe, LengthSection, _BY_HAND))):  # type: ignore[misc]
    """Length of the run, batch sizes, and how the model is run."""

    deterministic: bool = False
    """Use deterministic operations only: the same bits every time; slower."""
    router_aux: Literal["pooled", "previous"] = "pooled"
    """The router's load-balancing loss (arXiv 2101.03961), if the model's config asks for it. "pooled" counts the
    tokens per expert in a micro-batch of all data ranks, "previous" in the previous step."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or norm: stop, or skip the step. Three in a row always stop the run."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Hours until the run saves and ends."""
    early_stopping: Positive | None = None
    """End the run after this many evaluations in a row without a lower loss (patience)."""

    @property
    def streams_per_step(self) -> int:
        """Global batch size in streams."""
        return self.step_tokens // self.length

    @property
    def step_tokens(self) -> int:
        """`tokens_per_step`, with its default filled in."""
        return 32 * self.length if self.tokens_per_step is None else self.tokens_per_step


class OptimSection(Section):
    """The optimizer and the learning-rate schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """The optimizer. "muon" updates matrices by Muon and all else by AdamW; it is for pre-training, not for fine-tuning
    of models that AdamW has trained."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """The decay of the rate: "constant" has none, "linear" and "cosine" decay over all steps, "wsd" (warmup, stable,
    decay) linearly over the last `decay` of the steps. Once "wsd" decays, the run cannot be made longer."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Steps over which the rate rises from 0: a number, or a fraction of all steps."""
    decay: Fraction = 0.2
    """The fraction of all steps over which "wsd" decays."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The final rate, as a fraction of lr."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay. Norms and biases do not decay."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum."""
    by_head: bool = False
    """Muon updates queries, keys and values of each head as a matrix of its own (in a delta net, of each key head)."""
    exclude: list[str] = ["tower.*"]
    """Patterns of matrices that AdamW updates though kind is "muon", such as "layers.*.router"."""
    matrix_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype of Muon's iteration, and of what ranks send for it."""
    max_norm: Annotated[float, Field(gt=0)] | OnlyFalse = 1.0
    """Clip the global gradient norm to this number above 0; false does not clip."""
    state_dtype: Literal["float32", "bfloat16", "uint8"] | None = None
    """The stored dtype of the optimizer state; by default that of the weights. For AdamW's two moments "bfloat16" takes
    4 bytes per parameter instead of 8, "uint8" about 2."""


class HeldOutSection(SourceSection):
    """One of several held-out sets; each needs a unique name."""


class EvalSection(SourceSection):
    """Held-out data to evaluate on."""

    path: str | list[str] = ""
    """A source as in [[data]]; without a path nothing is evaluated."""
    every: Positive = 100
    """Steps between two evaluations; one more runs at the end."""
    sets: list[HeldOutSection] = []
    """Several named sets, instead of the single one of `path`."""
    best: bool = False
    """Keep the checkpoint with the lowest loss in OUT/best, in addition to those of [save]."""


class SaveSection(Section):
    """Checkpoints, from which the same command resumes."""

    every: Positive = 200
    """Steps between two checkpoints; one more is written at the end."""
    keep: Positive | Literal["all"] = 3
    """The number of newest checkpoints to keep."""
    keep_every: Positive | None = None
    """Keep the checkpoints of every multiple of this many steps too."""
    wait: bool = False
    """Wait until a checkpoint is on the disk; by default it is written in the background (asynchronously)."""
    export: bool = True
    """Write the trained weights as a Hugging Face directory, OUT/export, at the end. With `[lora]` these are the
    adapters alone, as a PEFT directory, OUT/adapter."""
    merged: bool = False
    """With `[lora]`: write OUT/export too, the weights with their adapters merged."""


class SampleSection(Section):
    """Texts that the model generates during the run. Each token takes one forward pass over all prompts."""

    prompts: list[str] = []
    """User messages, if the first source is of chats: its template, template_args and thinking apply, and with
    thinking = "auto" the template decides. Otherwise beginnings of texts. Without prompts nothing is sampled."""
    every: Positive = 500
    """Steps between two samples; one more is made at the end."""
    tokens: Positive = 64
    """The largest number of tokens per text; the model may end it earlier."""
    top_p: Fraction | None = None
    """Nucleus sampling: draw from the likeliest tokens of this total probability. By default greedy."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Draw tokens, with logits divided by this first. By default greedy, or 1 with top_p."""


class LogSection(Section):
    """Destinations of metrics, in addition to OUT/metrics.jsonl and the terminal."""

    every: Positive = 1
    """Steps between two lines on the terminal; metrics.jsonl has every step."""
    plain: bool = False
    """Print lines on the terminal instead of a live view."""
    tensorboard: bool = False
    """Write OUT/tensorboard too."""
    wandb: str = ""
    """The Weights & Biases project to log to as well."""
    profile: Annotated[int, Field(ge=0)] = 0
    """Steps to trace with torch's profiler, after the first two: OUT/profile/rank-0.json.gz, one file per rank."""


class LaunchSection(Section):
    """Start and restart of the ranks of this machine; under torchrun its options apply instead."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """The number of restarts from the newest checkpoint after a rank has failed."""
    fewer: bool = False
    """Leave out the failed rank at the first restart: the mesh shrinks, fsdp first, then replicate. By default only
    after a rank has failed twice."""
    shutdown_timeout: Positive = 600
    """Seconds that the ranks have to save after a signal before they are killed."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that ranks wait for a silent one before the run ends. Applies under torchrun too."""


class Config(Section):
    """A whole run file."""

    model: str
    """A Hugging Face directory, a hub id, a checkpoint, or a run (RUN, RUN/best), whose newest checkpoint is taken."""
    out: str
    """The output directory: checkpoints, metrics, the config as it was read, the exported model."""
    seed: Annotated[int, FIXED] = 0
    """The random seed of the data order and of samples."""
    objective: Annotated[
        Literal["sft", "dpo", "orpo", "simpo", "reward", "classify", "distill", "embedding", "rerank"], FIXED
    ] = "sft"
    """The training objective. sft: the next token, of chats or texts. distill: the same, with a teacher. dpo, orpo,
    simpo: preference pairs. reward: a reward model of such pairs. classify: a class for each text or chat. embedding:
    queries near their documents. rerank: yes or no for a query and a document."""
    resume: Literal["auto", "never"] | CheckpointPath = "auto"
    """auto: resume from the newest whole checkpoint in OUT. never: OUT must hold none. A path with a slash: start from
    that checkpoint if OUT has none. To load only its weights, pass it as `model`."""
    cache: str = "~/.cache/meshwright"
    """The cache of tokenised data, which all runs of a machine share."""
    mesh: MeshSection = MeshSection()
    pipeline: PipelineSection = PipelineSection()
    context: ContextSection = ContextSection()
    lora: LoraSection | None = None
    dpo: Annotated[DpoSection | None, FIXED] = None
    orpo: Annotated[OrpoSection | None, FIXED] = None
    simpo: Annotated[SimpoSection | None, FIXED] = None
    reward: Annotated[RewardSection | None, FIXED] = None
    classify: Annotated[ClassifySection | None, FIXED] = None
    distill: Annotated[DistillSection | None, FIXED] = None
    embedding: Annotated[EmbeddingSection | None, FIXED] = None
    rerank: Annotated[RerankSection | None, FIXED] = None
    data: Annotated[list[DataSection], Field(min_length=1), FIXED]
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    eval: EvalSection = EvalSection()
    save: SaveSection = SaveSection()
    sample: SampleSection = SampleSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()

    @model_validator(mode="before")
    @classmethod
    def _with_section_of_objective(cls, values: Any) -> Any:
        """Fill in the section of the objective. A section of another one is a mistake, so it is not filled in."""
        objective = values.get("objective") if isinstance(values, dict) else None
        missing = isinstance(objective, str) and objective in OBJECTIVES and values.get(objective) is None
        return {**values, objective: {}} if missing else values

    @property
    def recipe(self) -> Recipe:
        """The options of how the model is run, as `mw.load` takes them."""
        train = self.train.model_dump()
        memory = MemoryOptions(**{name: train[name] for name in MemoryOptions.__dataclass_fields__})
        pipeline, context = Pipeline(**self.pipeline.model_dump()), ContextParallel(**self.context.model_dump())
        others = {name: train[name] for name in Recipe.__dataclass_fields__.keys() - _BY_HAND}
        others |= {} if self.lora is None else {"lora": Lora(**self.lora.model_dump())}
        others |= {} if self.objective == "sft" else {"head": OBJECTIVES[self.objective].head}
        others |= {} if self.classify is None else {"labels": tuple(self.classify.labels)}
        return Recipe(dtype=getattr(torch, train["dtype"]), memory=memory, pipeline=pipeline, context=context, **others)

    @property
    def objective_options(self) -> Objective | None:
        """The options of the objective, None for the next token."""
        if self.objective == "sft":
            return None
        kind, section = OBJECTIVES[self.objective], getattr(self, self.objective)
        options = inspect.signature(kind).parameters
        return kind(**{name: value for name, value in section.model_dump().items() if name in options})


Place = tuple[str | int, ...]  # the path of a field: ("data", 0, "weight")


@dataclass(frozen=True)
class Leaf:
    """A field that holds a value, not a section. `field.metadata` holds its `Fixed` mark."""

    place: Place
    field: FieldInfo
    value: Any


def leaves(section: BaseModel, at: Place = ()) -> Iterator[Leaf]:
    """Yield every value of a config. A list of sections is yielded itself, and then the values in it."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*at, name))
            continue
        yield Leaf((*at, name), field, value)
        for number, each in enumerate(value if section_of(field.annotation) and value else ()):
            yield from leaves(each, (*at, name, number))


def declared(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield the path and field of everything that a section declares, nested sections included."""
    for name, field in section.model_fields.items():
        yield (*at, name), field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from declared(inner, (*at, name))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a field or of its list elements; None for a plain value."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def is_list(annotation: Any) -> bool:
    """Return whether a field is a list."""
    return get_origin(annotation) is list


def named(place: Place) -> str:
    """Format the path of a field: `data[0].weight`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def to_toml(value: Any) -> str:
    """Format a value as TOML, which the standard library can only read."""
    if isinstance(value, BaseModel):
        return to_toml(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {to_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf, -inf
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # DEL: allowed raw in JSON strings, not in TOML


def _key(name: str) -> str:
    """Quote a TOML key unless it may stand bare."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)
