"""How a model is run: one frozen value, from Python, from a run file or from the command line.

Each option is a field that is declared once, here. Its metadata makes the argument of `mw.load`, the field of a run
file, the flag of `plan` and `verify`, and the row of docs/reference.md. Nothing here imports torch, so that `--help`
answers at once.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from .errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch

RECOMPUTE = ("none", "selective", "full")
LATE = ("zero-bubble", "v")  # schedules that delay the gradients of weights
SCHEDULES = ("1f1b", *LATE)


_MARKS = {"costs": "", "choices": (), "number": "", "command": True, "fixed": False}


def option(default: Any, text: str, **marks: Any) -> Any:
    """Declare an option. The first sentence of `text` is what --help says.

    `marks`: `costs`, for the reference. `choices`, of texts. `number`, the flag that takes the number of a field that
    is True, False or a number. `command`: whether `plan` and `verify` take it. `fixed`: a resumed run must have the
    value that it began with.
    """
    assert marks.keys() <= _MARKS.keys(), f"there are no marks {marks.keys() - _MARKS.keys()}"
    return field(default=default, metadata={**_MARKS, "text": text, **marks})


@dataclass(frozen=True)
class MemoryOptions:
    """What a run trades for memory or time. The numbers stay the same, but for rounding."""

    recompute: str = option(
        "none", 'What backward computes again instead of keeping it: "selective" norms, rotations, gates and the '
        'delta rule, "full" whole layers, of which only the input and the choice of experts are kept.',
        costs='"selective": passes over activations. "full": a third more matmuls; the collectives of forward once '
        "more, except for the last of each layer", choices=RECOMPUTE,
    )  # fmt: skip
    reshard: bool = option(
        True, "Free gathered parameters after forward and gather them again for backward. False saves that all-gather.",
        costs="False: the whole model stays gathered in the compute dtype from forward to backward", command=False,
    )  # fmt: skip
    offload: bool = option(
        False, "Keep parameters, gradients and moments in host memory, where AdamW then runs.",
        costs="copies to and from the device. Float32 parameters (`A_log` and others, small) stay on the device; with "
        "`replicate`, gradients too until the last micro-batch",
    )  # fmt: skip
    compiled: bool = option(
        False, "Run torch.compile over each layer, which takes minutes in the first step. It fuses norms, gates and "
        "rotations.",
        costs="the compilation, again for every other number of tokens: pack to one length. Attention, delta rule, "
        "router and experts, a shared one too, are not compiled", command=False,
    )  # fmt: skip
    gather_once: bool = option(
        False, "Gather parameters once a step, not in each micro-batch.",
        costs="the whole model stays gathered in the compute dtype through the step",
    )  # fmt: skip
    sum_once: bool = option(
        False, "Reduce gradients once a step, not after each micro-batch.",
        costs="the gradients of the whole model, as wide as they are summed (float32)",
    )  # fmt: skip
    narrow_grads: bool = option(
        False, "Send gradients to their shards in the compute dtype, by an all-to-all, and sum them there in float32. "
        "It rounds nothing, and takes half of the bytes in bfloat16.",
        costs="buffers for what a unit sends and gets. Shards should lie in one node: between nodes an all-to-all "
        "carries more than a ring, [a plan](plan.md) says how much. Replicas are summed in float32, as without. Where "
        "a pipeline accumulates gradients until the end of a step (`Pipeline(hold=)`), these go once, and wide",
    )  # fmt: skip
    token_once: bool | int = option(
        False, "Under ep, send a token once to each rank that holds some of its experts, not once to each of these "
        "experts. A number N makes N consecutive ep ranks a node: a token goes once to each node, and from there once "
        "to each rank.",
        costs="expert numbers and weights beside the rows; sorting. In bfloat16 sums are rounded once a rank, not "
        "once an expert, and over nodes once a node more. Over nodes the host waits for the device twice a layer, and "
        '`recompute="selective"` keeps what came to the node too. What [the bill](plan.md) says of these rows is '
        "likely, not certain: the router decides", number="token_once_a_node",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if type(self.token_once) is not bool and (type(self.token_once) is not int or self.token_once < 1):
            raise ConfigError(
                f"token_once={self.token_once!r} is not a number of ranks; give True, or how many ranks a node has"
            )
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"recompute={self.recompute!r} is unknown; choose from {', '.join(RECOMPUTE)}")
        once = "gather_once" if self.gather_once else "sum_once" if self.sum_once else ""
        if self.offload and once:
            raise ConfigError(
                f"offload=True takes parameters and gradients off the device, where {once}=True keeps those of the "
                "whole model; choose one of them"
            )
        if self.sum_once and self.narrow_grads:
            raise ConfigError(
                "sum_once=True adds gradients up in float32 before it sends them, and narrow_grads=True sends them as "
                "narrow as matmuls make them; choose one of them"
            )
        if self.compiled and self.recompute == "selective":
            raise ConfigError(
                'recompute="selective" chooses among the operations of a layer, which compiled=True fuses; '
                'choose recompute="full" or "none", or compiled=False'
            )

    @property
    def gathers_wide(self) -> bool:
        """Whether FSDP gathers the values of what matmuls take in 8 bits: from host memory, because the hooks that
        quantise are lost in the copy on the device, and for compiled layers, whose graphs the hooks would split."""
        return self.offload or self.compiled


@dataclass(frozen=True)
class Pipeline:
    """How a run goes through its pipeline stages. With pp=1 it says nothing."""

    schedule: str = option(
        "1f1b", "The order of the work. 1f1b alternates forwards and backwards; zero-bubble fills the time in which a "
        "rank would wait with the gradients of weights (arXiv 2401.10241); v does so with two stages a rank, there "
        "and back: it waits least, and every rank keeps equally many activations.", choices=SCHEDULES,
    )  # fmt: skip
    stages: int = option(
        1, "Stages of each rank; v has 2. With more of them a rank waits less, sends more often, and keeps more. With "
        "the other schedules the micro-batches of a step must then be a multiple of pp.",
    )  # fmt: skip
    ends: tuple[int, ...] | None = option(
        None, "After how many layers each stage ends, the last after all of them. By default stages cost about the "
        "same, by the elements that a token is multiplied with, the head among them.",
    )  # fmt: skip
    hold: bool | None = option(
        None, "Gather parameters and sum gradients once a step, not in each micro-batch. It takes memory for the "
        "gathered stages and for their whole gradients. By default where both take less than a third of the memory, "
        "and with zero-bubble and v, which need it.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        given: object = self.hold
        if type(self.schedule) is not str or self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} is unknown; choose from {', '.join(SCHEDULES)}")
        if self.schedule == "v" and self.stages == 1:
            object.__setattr__(self, "stages", 2)
        if type(self.stages) is not int or self.stages < 1:
            raise ConfigError(f"stages={self.stages!r} must be a number of stages a rank, 1 or more")
        if given not in (True, False, None) or type(given) is int:
            raise ConfigError(f"hold={given!r} must be True, False or None (where there is room)")
        self._check_ends(self.ends)

    def _check_ends(self, ends: object) -> None:
        if ends is None:
            return
        if not isinstance(ends, list | tuple) or not all(type(end) is int for end in ends):
            raise ConfigError(f"ends={ends!r} must be a list of numbers of layers, after which the stages end")
        object.__setattr__(self, "ends", tuple(ends))


@dataclass(frozen=True)
class ContextParallel:
    """How mixers come to the tokens of other ranks of cp. The numbers stay the same, but for rounding."""

    attention: int | None = option(
        None, "How many neighbours on cp swap tokens for heads, as in Ulysses (arXiv 2309.14509). Over the others "
        "keys and values are gathered: cp swaps alone, 1 gathers alone. By default the largest number that divides cp "
        "and the heads of a tp rank.",
    )  # fmt: skip
    delta: int | None = option(
        None, "How many neighbours on cp swap tokens for heads of the delta net, which passes its state on over the "
        "others. By default cp if it divides the key heads of a tp rank, else 1.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and (type(size) is not int or size < 1):
                raise LayoutError(
                    f"{name}={size!r} of mw.ContextParallel is not a number of ranks; give 1 or more, or None"
                )


@dataclass(frozen=True)
class Recipe:
    """How a model is run: what `mw.load` takes beside the model and the mesh."""

    head: str = option(
        "lm", 'Which head is trained: "lm" the vocabulary; "value" one score a token, or one for each label of a '
        'classifier, from `score.weight` and `score.bias`; a language model gets a new one; "none" no head.',
        choices=("lm", "value"),
    )  # fmt: skip
    dtype: "torch.dtype | None" = option(  # noqa: RUF009 - it makes a field
        None, "What is computed in: `torch.bfloat16` (also None), `torch.float32`, `torch.float64`.", command=False,
    )  # fmt: skip
    train: str | Sequence[str] = option(
        "**", "Patterns of the parameters that are trained; all others are frozen.", command=False, fixed=True,
    )  # fmt: skip
    tower: bool = option(
        False, "Train the vision tower too, as `train` says; batches may then hold pictures and videos. Without it "
        "the weights of the tower are kept as they are.", fixed=True,
    )  # fmt: skip
    memory: MemoryOptions = option(MemoryOptions(), "What to trade for memory or time: `mw.MemoryOptions`.")
    pipeline: Pipeline = option(
        Pipeline(), "Which layers a rank has and in which order it works, where the mesh has pp: `mw.Pipeline`.",
    )  # fmt: skip
    context: ContextParallel = option(
        ContextParallel(), "How mixers come to the tokens of other ranks of cp: `mw.ContextParallel`.",
    )  # fmt: skip
    fp8: str | None = option(
        None, 'Multiply 8-bit numbers with a scale for each block of 128 ("block"), which Hopper GPUs make fast.',
        choices=("block",),
    )  # fmt: skip
    fp8_skip: str | Sequence[str] = option((), "Patterns of the parameters whose matmuls stay in `dtype`.")

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("memory", MemoryOptions, "recompute='full'"), ("pipeline", Pipeline, "stages=2"),
            ("context", ContextParallel, "attention=1"),
        ):  # fmt: skip
            value = vars(self)[name]
            if not isinstance(value, kind):
                whole = f"mw.{kind.__name__}"
                raise ConfigError(f"{name}={value!r} must be {whole}(...), such as {whole}({example})")
        if not isinstance(self.tower, bool):
            raise ConfigError(f"tower={self.tower!r} must be True or False")
        if self.fp8 not in (None, "block"):
            raise ConfigError(
                f"fp8={self.fp8!r:.80} is unknown; give fp8='block', or leave it out for matmuls in dtype="
            )
        patterns_of(self.train, "train")
        if patterns_of(self.fp8_skip, "fp8_skip") and self.fp8 is None:
            raise ConfigError(
                f"fp8_skip={self.fp8_skip!r} skips nothing without fp8='block'; give both, or leave it out"
            )

    def plain(self, **fields: Any) -> "Recipe":
        """Return a recipe that lays the same model out in the same way, with no option for memory or speed."""
        return replace(self, memory=MemoryOptions(), fp8=None, fp8_skip=(), **fields)

    def check_schedule(self) -> None:
        """Refuse what does not go with a schedule that delays the gradients of weights."""
        pipeline = self.pipeline
        if pipeline.schedule not in LATE:
            return
        if self.memory.compiled:
            raise ConfigError(
                f"schedule={pipeline.schedule!r} cuts backward in two, and a compiled layer has one that cannot be "
                "cut; choose schedule='1f1b' or compiled=False"
            )
        if pipeline.hold is False:
            raise ConfigError(
                f"schedule={pipeline.schedule!r} with hold=False: delayed gradients would be summed for each "
                "micro-batch alone; leave hold out, or choose schedule='1f1b'"
            )


class RecipeFields(TypedDict, total=False):
    """The fields of `Recipe` as keyword arguments, for type checkers; a test holds the two together."""

    head: str
    dtype: "torch.dtype | None"
    train: str | Sequence[str]
    tower: bool
    memory: MemoryOptions
    pipeline: Pipeline
    context: ContextParallel
    fp8: str | None
    fp8_skip: str | Sequence[str]


def patterns_of(given: object, argument: str = "train") -> list[str]:
    """Return the patterns of names that a caller gave, one or several, as a list."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{argument}={given!r} must be a pattern of names, or a list of them, such as 'layers.*'")
    return list(patterns)


def matching(patterns: Iterable[str], names: Iterable[str], argument: str) -> list[str]:
    """Return the names that match a pattern, in their order. Refuse a pattern that matches none."""
    names, found = list(names), set[str]()
    for pattern in patterns:
        matched = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise ConfigError(
                f"{argument}={pattern!r} matches no parameter; names are like {names[0]}, and model.trainable of a "
                "model that is loaded without train= lists them"
            )
        found |= matched
    return [name for name in names if name in found]
