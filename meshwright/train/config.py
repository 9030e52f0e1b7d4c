"""What a run is: the fields of its file, with what each means. docs/train-config.md is made of these declarations."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ..recipe import ContextParallel, MemoryOptions, Pipeline, Recipe


@dataclass(frozen=True)
class Fixed:
    """Whether a run that goes on must have the value that it began with, of a field or of all in a section."""

    fixed: bool = True


WARM_UP = 2  # steps before a trace: in them memory grows, kernels are chosen and layers compiled
FIXED, FREE = Fixed(), Fixed(False)
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _false(given: Any) -> Any:
    """Refuse 0 and 0.0, which Python takes for false."""
    if given is not False:
        raise PydanticCustomError("literal_error", "it should be {expected}", {"expected": "false"})
    return given


No = Annotated[Literal[False], BeforeValidator(_false)]
CheckpointPath = Annotated[str, Field(pattern="/")]  # without a slash, a slip in "auto" would be a path


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


class MeshSection(Section):
    """How many ranks there are on each axis. Their product, without ep, is the number of processes."""

    replicate: Positive = 1
    """Copies of the model, each with its own data."""
    fsdp: Positive = 1
    """Ranks that share the parameters of a copy, each with its own data."""
    tp: Positive = 1
    """Ranks that share every layer and work on the same data."""
    ep: Positive = 1
    """Ranks that share the experts, out of those that there are."""
    cp: Positive = 1
    """Ranks that share the tokens of a stream, for long documents; they work on the same data."""
    pp: Positive = 1
    """Ranks that follow each other in the layers: pipeline stages. They work on the same data."""

    @property
    def num_data_ranks(self) -> int:
        return self.replicate * self.fsdp

    @property
    def world(self) -> int:
        return self.pp * self.num_data_ranks * self.cp * self.tp


def made_of(options: type[Any], base: type[Section] = Section, but: Container[str] = ()) -> type[Section]:
    """Make a section with a field for each field of a dataclass of options."""
    chosen: dict[str, Any] = {
        each.name: _declared(each) for each in dataclasses.fields(options) if each.name not in but
    }
    return create_model(base.__name__, __base__=base, **chosen)


def _declared(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    choices, default = option.metadata["choices"], [] if option.default == () else option.default
    kind = Literal[choices] if choices else _of_a_file(option.type)
    kind = kind | None if choices and default is None else kind
    text = Field(default, description=option.metadata["text"])
    return (Annotated[kind, FIXED] if option.metadata["fixed"] else kind), text


def _of_a_file(kind: Any) -> Any:
    """Return the type that a file holds of an option: numbers are above 0, and sequences are lists."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(_of_a_file, get_args(kind)))
    if get_origin(kind) in (tuple, Sequence):
        return GenericAlias(list, (_of_a_file(get_args(kind)[0]),))
    return Positive if kind is int else kind


class ContextSection(made_of(ContextParallel)):  # type: ignore[misc]  # the fields are those of the dataclass
    """How layers come to the tokens of other ranks of cp; docs/long-contexts.md says what each way costs."""


class PipelineSection(made_of(Pipeline)):  # type: ignore[misc]  # the fields are those of the dataclass
    """How a step goes through the stages, where the mesh has pp."""


class PicturesSection(Section):
    """How pictures and videos of chats are read, where the tower is trained."""

    root: Annotated[str, FREE] = ""
    """The directory in which relative paths begin; by default that of the data."""
    max_pixels: Positive | None = None
    """A picture with more is made smaller; 1024 of them take one token. By default as the processor says."""
    max_video_pixels: Positive | None = None
    """The same of all pictures of a video together; 2048 of them take one token."""
    fps: Annotated[float, Field(gt=0)] | None = None
    """How many pictures a second are taken of a video; by default as the processor says, mostly 2."""


class SourceSection(Section):
    """Where documents come from, and what is learnt of them."""

    path: Annotated[str | list[str], FREE]
    """A file (.jsonl, .parquet, .txt, .md, or a .json that is a list of rows), a directory of them (without .json), a
    Hugging Face data set (a hub id, or a directory that save_to_disk has written), or a list of these."""
    hf_subset: Annotated[str, FREE] = ""
    """Of a hub id, or of a directory that is laid out like one: which of its subsets."""
    hf_split: Annotated[str, FREE] = ""
    """Of a Hugging Face data set: which of its splits, such as "train"; needed where it has several."""
    hf_revision: Annotated[str, FREE] = ""
    """Of a hub id: the branch, tag or commit; by default the newest."""
    kind: Literal["chat", "text", "tokens"] = "chat"
    """chat: messages, of which the assistant's are learnt. text: all is learnt. tokens: rows of ids."""
    name: str = ""
    """What the source is called in messages and metrics; by default its path."""
    fields: dict[str, str] = {}
    """What fields are called in the rows, by what they are called here: {messages = "dialog"}."""
    thinking: Literal["auto"] | bool = "auto"
    """Whether the prompt of a turn asks for thinking; "auto": where the turn thinks."""
    turns: Literal["each", "last", "joined"] = "each"
    """Which turns of the assistant are learnt. "joined" renders a chat once, by the marks of its template."""
    template: Annotated[str, FREE] = ""
    """A file with a chat template, instead of the tokenizer's."""
    template_args: dict[str, JsonValue] = {}
    """What the template gets beside the messages."""
    split: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a .txt or .md."""
    pictures: PicturesSection = PicturesSection()
    too_long: Literal["stop", "drop", "cut"] | None = None
    """What becomes of documents longer than a stream; by default a chat stops the run, a text is cut. Those that are
    dropped are counted by `meshwright data`."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What becomes of rows that cannot be used: they stop the run before it starts, or are left out and counted. Either
    way a file beside the cache names each."""


class DataSection(SourceSection):
    """A source of documents."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the source in an epoch; 0.5 takes another half in each. A weight of which not one document follows is
    refused."""
    share: Share | None = None
    """Share of the tokens, instead of weights: of all sources or of none, and not with epochs."""


class LengthSection(Section):
    length: Annotated[int, Field(ge=2), FIXED] = 8192
    """Tokens of a packed stream, which is a micro-batch of a data rank."""
    tokens_per_step: Annotated[Positive | None, FIXED] = None
    """Tokens of a step over all data ranks, filler included; how many micro-batches follows. By default 32 streams."""
    steps: Positive | None = None
    """How many steps; or epochs, or tokens. By default one epoch."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """How many passes over the data."""
    tokens: str | Positive | None = None
    """How many tokens: a number, or one with K, M, B or T, such as "2B"."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Return the dtype of matmuls. Weights and moments are kept in float32, or in float64 with that."""


_ELSEWHERE = {"head", "dtype", "memory", "pipeline", "context"}  # declared in another way than by `made_of(Recipe)`


class TrainSection(made_of(MemoryOptions, made_of(Recipe, LengthSection, _ELSEWHERE))):  # type: ignore[misc]  # as above
    """How much is trained, and in which pieces."""

    deterministic: bool = False
    """Only operations that give the same bits each time; slower."""
    router_aux: Literal["pooled", "previous"] = "pooled"
    """How the load of experts is balanced, where the model's config asks for it."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What follows a loss or a norm that is no number: the end, or the next step; after 3 in a row always the end."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Hours after which the run saves and ends."""
    early_stopping: Positive | None = None
    """The run ends when so many evaluations in a row have found no lower loss."""

    @property
    def streams_per_step(self) -> int:
        return self.step_tokens // self.length

    @property
    def step_tokens(self) -> int:
        return 32 * self.length if self.tokens_per_step is None else self.tokens_per_step


class OptimSection(Section):
    """AdamW, and its learning rate over the steps."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """The highest learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How it falls: not at all, in a line, as a cosine, or in a line over the last `decay` of the steps. Once "wsd" has
    begun to fall, the run cannot be made longer."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0.03
    """In which it rises from 0: a share of the steps, or a number of them."""
    decay: Share = 0.2
    """The share of the steps in which wsd falls."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where it ends, as a share of lr."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Of AdamW."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Of AdamW. Norms and biases do not decay."""
    max_norm: Annotated[float, Field(gt=0)] | No = 1.0
    """Gradients are scaled down to this norm, a number above 0; false does not scale them."""
    state_dtype: Literal["float32", "bfloat16", "uint8"] | None = None
    """Of both moments, as stored; by default that of the weights. "bfloat16" takes 4 bytes a parameter, not 8, and
    "uint8" about 2."""


class HeldOutSection(SourceSection):
    """One of several held-out sets; each needs a name of its own."""


class EvalSection(SourceSection):
    """Held-out data, of which the loss is told."""

    path: str | list[str] = ""
    """As of [[data]]; without one nothing is evaluated."""
    every: Positive = 100
    """Steps between two evaluations; there is one at the end too."""
    sets: list[HeldOutSection] = []
    """Several sets, each with a name, instead of the one of `path`."""
    best: bool = False
    """The checkpoint with the lowest loss stays in OUT/best, beside those that [save] keeps."""


class SaveSection(Section):
    """Checkpoints, from which the same command goes on."""

    every: Positive = 200
    """Steps between two checkpoints; there is one at the end too."""
    keep: Positive | Literal["all"] = 3
    """How many of the last ones stay."""
    keep_every: Positive | None = None
    """Those of every so many steps stay too."""
    wait: bool = False
    """The next step begins when a checkpoint is on the disk; by default it is written beside the training."""
    export: bool = True
    """Write the trained weights as a Hugging Face directory, OUT/export, at the end."""


class SampleSection(Section):
    """Texts that the model writes during the run. Each token takes a forward of its own, of all prompts together."""

    prompts: list[str] = []
    """What a user says, if the first source is of chats: its template, template_args and thinking hold, and with
    thinking = "auto" the template decides. Otherwise where a text begins. Without any nothing is sampled."""
    every: Positive = 500
    """Steps between two samples; there is one at the end too."""
    tokens: Positive = 64
    """Of each text at most; it ends earlier where the model ends it."""
    top_p: Share | None = None
    """Each token is drawn from the likeliest that have this probability together; by default the likeliest is taken."""


class LogSection(Section):
    """Where metrics go, beside OUT/metrics.jsonl and the terminal."""

    every: Positive = 1
    """Steps between two lines on the terminal; metrics.jsonl has all."""
    plain: bool = False
    """Lines on the terminal instead of a live view."""
    tensorboard: bool = False
    """Write OUT/tensorboard too."""
    wandb: str = ""
    """The project of Weights & Biases that gets them too."""
    profile: Annotated[int, Field(ge=0)] = 0
    """Steps to trace with torch's profiler, after the first two of a start: OUT/profile/rank-0.json.gz of each rank."""


class LaunchSection(Section):
    """How the ranks of this machine are started; torchrun has options of its own."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often a run whose rank died is started again from its newest checkpoint."""
    fewer: bool = False
    """A restart leaves out the rank that failed: the mesh gets smaller, fsdp first, then replicate. By default this
    waits until a rank has failed twice."""
    shutdown_timeout: Positive = 600
    """Seconds in which the ranks may save after a signal, before they are killed."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that the ranks wait for one that is silent before the run ends. Under torchrun too."""


class Config(Section):
    """All of a run."""

    model: str
    """A Hugging Face directory, a hub id, a checkpoint, or a run (RUN, RUN/best), of which the newest is taken."""
    out: str
    """The directory of the run: checkpoints, metrics, the config as it was read, the exported model."""
    seed: Annotated[int, FIXED] = 0
    """Of the order of the data, and of what is drawn in samples."""
    resume: Literal["auto", "never"] | CheckpointPath = "auto"
    """auto: the same command goes on from the newest whole checkpoint in OUT. never: OUT must hold none. A path with a
    slash: begin from that checkpoint, where OUT has none. For its weights alone, give it as the model."""
    cache: str = "~/.cache/meshwright"
    """Where tokenised data is kept, for all runs of a machine."""
    mesh: MeshSection = MeshSection()
    pipeline: PipelineSection = PipelineSection()
    context: ContextSection = ContextSection()
    data: Annotated[list[DataSection], Field(min_length=1), FIXED]
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    eval: EvalSection = EvalSection()
    save: SaveSection = SaveSection()
    sample: SampleSection = SampleSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()

    @property
    def recipe(self) -> Recipe:
        """How the model is run."""
        train = self.train.model_dump()
        memory = MemoryOptions(**{name: train[name] for name in MemoryOptions.__dataclass_fields__})
        pipeline, context = Pipeline(**self.pipeline.model_dump()), ContextParallel(**self.context.model_dump())
        own = {name: train[name] for name in Recipe.__dataclass_fields__.keys() - _ELSEWHERE}
        return Recipe(dtype=getattr(torch, train["dtype"]), memory=memory, pipeline=pipeline, context=context, **own)


Place = tuple[str | int, ...]  # ("data", 0, "weight")


@dataclass(frozen=True)
class Leaf:
    """A field that holds a value, not a section. `field.metadata` has its marks."""

    place: Place
    field: FieldInfo
    value: Any


def leaves(section: BaseModel, at: Place = ()) -> Iterator[Leaf]:
    """All values of a config. A list of sections is one, and so is what it holds."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*at, name))
            continue
        yield Leaf((*at, name), field, value)
        for number, each in enumerate(value if section_of(field.annotation) else ()):
            yield from leaves(each, (*at, name, number))


def declared(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """All fields that there are, sections among them."""
    for name, field in section.model_fields.items():
        yield (*at, name), field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from declared(inner, (*at, name))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or is a list of."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list


def named(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def written(value: Any) -> str:
    """As in the file. tomllib reads, and nothing in the standard library writes."""
    if isinstance(value, BaseModel):
        return written(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf, -inf
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # JSON takes it bare, TOML does not


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else written(name)
