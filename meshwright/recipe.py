"""The recipe: all options for running a model, in one frozen dataclass.

Each option is a dataclass field, declared once in this module. From it follow the argument of `mw.load`, the field of a
run file, the flag of `plan` and `verify`, and the row of docs/reference.md. The module imports no torch, so that
`--help` answers at once.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from .errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch

RECOMPUTE = ("none", "selective", "full")
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer
# Schedules that split backward: activation gradients come first, because another stage waits for them, and weight
# gradients later, to fill the bubble (zero bubble, arXiv 2401.10241).
LATE = ("zero-bubble", "v")
SCHEDULES = ("1f1b", *LATE)
FOUR_BITS = ("nf4", "nvfp4", "mxfp4")  # names of codings in ops/codings.py


_MARKS = {"costs": "", "choices": (), "number": "", "command": True, "fixed": False}


def option(default: Any, text: str, **marks: Any) -> Any:
    """Declare an option. `--help` shows the first sentence of `text`.

    `marks`: `costs`: text for the reference. `choices`: allowed strings. `number`: the flag for the number of a field
    that is True, False or a number. `command`: whether `plan` and `verify` take it. `fixed`: a resumed run must keep
    this value.
    """
    assert marks.keys() <= _MARKS.keys(), f"unknown marks {marks.keys() - _MARKS.keys()}"
    return field(default=default, metadata={**_MARKS, "text": text, **marks})


@dataclass(frozen=True)
class MemoryOptions:
    """Options that trade memory, communication and compute. Results differ by rounding only."""

    recompute: str = option(
        "none", 'What backward recomputes instead of storing it (activation checkpointing): "selective" norms, '
        'rotations, gates and the delta rule, "full" whole layers, which keep only their `[T, D]` input.',
        costs='"selective": passes over activations. "full": a third more matmul work; the forward collectives once '
        "more, except for the last of each layer", choices=RECOMPUTE,
    )  # fmt: skip
    reshard: bool = option(
        True, "Free gathered parameters after forward and gather them again for backward. False saves that all-gather.",
        costs="False: the whole model stays gathered in the compute dtype from forward to backward", command=False,
    )  # fmt: skip
    offload: bool = option(
        False, "Keep parameters, gradients and optimizer state in host memory, where AdamW then runs.",
        costs="copies to and from the device. Float32 parameters (`A_log` and others, small) stay on the device; with "
        "`replicate`, gradients too until the last micro-batch",
    )  # fmt: skip
    compiled: bool | None = option(
        None, "Run torch.compile over each layer in passes with gradients, which takes minutes in the first step. It "
        'fuses norms, gates and rotations. By default on a GPU, unless `recompute="selective"`, a schedule that splits '
        "backward, `fp8` or the machine forbids it, which the log says.",
        costs="compilation, again for every other number of tokens: pack to one length. Attention, delta rule, router "
        "and experts (shared ones too) are not compiled", command=False,
    )  # fmt: skip
    gather_once: bool = option(
        False, "All-gather parameters once a step, not in each micro-batch.",
        costs="the whole model stays gathered in the compute dtype through the step",
    )  # fmt: skip
    sum_once: bool = option(
        False, "Reduce-scatter gradients once a step, not after each micro-batch (like `no_sync` of DDP and FSDP).",
        costs="unsharded gradients of the whole model, in the dtype of the reduction (float32)",
    )  # fmt: skip
    narrow_grads: bool = option(
        False, "Send gradients to their shards in the compute dtype, by an all-to-all, and sum them in float32 on the "
        "rank that stores the shard. That is half the bytes in bfloat16, without rounding partial sums.",
        costs="send and receive buffers for one unit. Keep shards inside one node: between nodes an all-to-all "
        "carries more than a ring, [a plan](plan.md) says how much. Replicas are summed in float32 as usual. Where a "
        "pipeline accumulates gradients until the end of a step (`Pipeline(hold=)`), they are sent once, in float32",
    )  # fmt: skip
    token_once: bool | int = option(
        False, "Under ep, send a token once to each rank that holds some of its experts, not once to each of these "
        "experts. A number N makes N consecutive ep ranks a node: a token goes once to each node, and inside the "
        "node once to each rank.",
        costs="expert ids and weights travel with the rows; sorting. In bfloat16 sums are rounded once per rank, not "
        "once per expert, and once more per node. With nodes the host synchronizes with the device twice a layer, "
        'and `recompute="selective"` also keeps the rows that arrived at the node. The number of rows in '
        "[the bill](plan.md) is an expectation, because the router decides", number="token_once_a_node",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse values out of range, and options that contradict each other."""
        if type(self.token_once) is not bool and (type(self.token_once) is not int or self.token_once < 1):
            raise ConfigError(
                f"token_once={self.token_once!r} is not a number of ranks; give True, or how many ranks a node has"
            )
        if self.compiled not in (True, False, None) or type(self.compiled) is int:
            raise ConfigError(
                f"compiled={self.compiled!r} must be True, False or None (on a GPU, if nothing forbids it)"
            )
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"recompute={self.recompute!r} is unknown; choose from {', '.join(RECOMPUTE)}")
        # Both need the whole unsharded model on the device for a step, which `offload` exists to avoid.
        once = "gather_once" if self.gather_once else "sum_once" if self.sum_once else ""
        if self.offload and once:
            raise ConfigError(
                f"offload=True moves parameters and gradients off the device, and {once}=True keeps those of the whole "
                "model on it; choose one of them"
            )
        if self.sum_once and self.narrow_grads:
            raise ConfigError(
                "sum_once=True accumulates gradients in float32 before it reduces them, and narrow_grads=True sends "
                "them in the compute dtype; choose one of them"
            )
        if self.compiled and self.recompute == "selective":
            raise ConfigError(
                'recompute="selective" chooses among the operations of a layer, which compiled=True fuses; '
                'choose recompute="full" or "none", or compiled=False'
            )

    @property
    def gathers_wide(self) -> bool:
        """Return whether FSDP all-gathers values in the compute dtype, even for weights whose matmuls are in FP8.

        Copying parameters from host memory loses the hooks that quantise before the all-gather, and these hooks would
        split the graphs of compiled layers.
        """
        return self.offload or self.compiled is True


@dataclass(frozen=True)
class Pipeline:
    """Options of pipeline parallelism. They have no effect with pp=1."""

    schedule: str = option(
        "1f1b", "The pipeline schedule. 1f1b alternates forward and backward passes; zero-bubble splits backward in "
        "two and fills the bubble with weight gradients (arXiv 2401.10241); v does so with two stages per rank, placed "
        "in a V: it has the smallest bubble, and every rank keeps equally many activations.", choices=SCHEDULES,
    )  # fmt: skip
    stages: int = option(
        1, "Stages per rank (interleaving); v has 2. More than one makes the bubble smaller, sends more often, and "
        "keeps more activations. With the other schedules the micro-batches of a step must then be a multiple of pp.",
    )  # fmt: skip
    ends: tuple[int, ...] | None = option(
        None, "After how many layers each stage ends; the last ends after all of them. By default stages have about "
        "equal cost, measured by the parameters a token is multiplied with, head included.",
    )  # fmt: skip
    hold: bool | None = option(
        None, "Gather parameters and reduce gradients once a step, not in each micro-batch. It keeps the gathered "
        "stages and their unsharded gradients in memory. By default where both fit into a third of the memory, and "
        "with zero-bubble and v, which need it.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse values out of range. The schedule v implies two stages per rank."""
        hold: object = self.hold
        if type(self.schedule) is not str or self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} is unknown; choose from {', '.join(SCHEDULES)}")
        if self.schedule == "v" and self.stages == 1:
            object.__setattr__(self, "stages", 2)
        if type(self.stages) is not int or self.stages < 1:
            raise ConfigError(f"stages={self.stages!r} must be a number of stages a rank, 1 or more")
        if hold not in (True, False, None) or type(hold) is int:
            raise ConfigError(f"hold={hold!r} must be True, False or None (where memory allows it)")
        self._check_ends(self.ends)

    def _check_ends(self, ends: object) -> None:
        """Refuse anything but layer counts. Their number and order are checked with the mesh, which has the stages."""
        if ends is None:
            return
        if not isinstance(ends, list | tuple) or not all(type(end) is int for end in ends):
            raise ConfigError(f"ends={ends!r} must be a list of layer counts after which the stages end")
        object.__setattr__(self, "ends", tuple(ends))


@dataclass(frozen=True)
class ContextParallel:
    """Options for how mixers see the tokens of other cp ranks. Results differ by rounding only."""

    attention: int | None = option(
        None, "How many consecutive cp ranks exchange tokens for heads (Ulysses all-to-all, arXiv 2309.14509). Over "
        "the remaining factor keys and values are all-gathered: cp is all-to-all only, 1 all-gather only. By default "
        "the largest number that divides cp and the heads of a tp rank.",
    )  # fmt: skip
    delta: int | None = option(
        None, "How many consecutive cp ranks exchange tokens for heads of the gated delta net, which passes its state "
        "over the remaining factor. By default cp if it divides the key heads of a tp rank, else 1.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse sizes below 1. Whether they divide cp and the heads is checked with the mesh and the model."""
        for name, size in vars(self).items():
            if size is not None and (type(size) is not int or size < 1):
                raise LayoutError(
                    f"{name}={size!r} of mw.ContextParallel is not a number of ranks; give 1 or more, or None"
                )


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685): `W + alpha / rank * B @ A`, with W frozen."""

    rank: int = option(16, "Rank of the adapters.")
    alpha: float = option(
        32.0, "Scale of the adapters: `alpha / rank` times `B @ A` is added to a matrix.",
    )  # fmt: skip
    targets: str | Sequence[str] = option(
        ALL_LINEAR, 'Modules with adapters, by PEFT\'s names: the last parts of a name ("q_proj", "mlp.down_proj"), or '
        'a pattern of the whole name ("model.layers.1?.*"). "all-linear" means all of attention, delta net and MLPs, '
        "shared and routed experts too, and of a trained vision encoder; never embedding, head and router.",
    )  # fmt: skip
    expert_rank: int | None = option(
        None, "Rank of the adapters of routed experts; by default `rank`. There are many experts, each with adapters "
        "of its own. Their scale stays that of `rank`.",
    )  # fmt: skip
    rslora: bool = option(
        False, "Scale by `alpha / sqrt(rank)` instead (rsLoRA, arXiv 2312.03732), so that large ranks do not train "
        "more slowly.",
    )  # fmt: skip
    dropout: float = option(
        0.0, "Only 0 is supported: a mask would have to be the same on all meshes and in recomputation.",
        command=False,
    )  # fmt: skip
    b_std: float = option(
        0.0, "Standard deviation of B at the start. 0, as in PEFT, makes step 0 equal to the base bit for bit. Proofs "
        "draw B, because A has no gradient where B is 0.", command=False,
    )  # fmt: skip
    path: str | None = option(None, "Directory of a PEFT adapter to go on from. It must fit rank, alpha and targets.")

    def __post_init__(self) -> None:
        for name in ("rank", "expert_rank"):
            value = vars(self)[name]
            if (type(value) is not int or value < 1) and not (name == "expert_rank" and value is None):
                raise ConfigError(f"lora.{name}={value!r} must be a whole number of at least 1")
        for name in ("alpha", "b_std", "dropout"):
            value = vars(self)[name]
            if type(value) not in (int, float) or not 0 <= value < float("inf") or (name == "alpha" and not value):
                raise ConfigError(f"lora.{name}={value!r} must be a number above 0" + (", or 0" * (name != "alpha")))
        if self.dropout:
            raise ConfigError(
                f"lora.dropout={self.dropout!r} is not supported: its mask would have to be the same on every mesh and "
                "in recomputation; leave it out, and use fewer epochs or a smaller rank against overfitting"
            )
        object.__setattr__(self, "targets", tuple(patterns_of(self.targets, "lora.targets")))
        if not self.targets:
            raise ConfigError(f"lora.targets is empty; give {ALL_LINEAR!r}, or names of modules such as 'q_proj'")

    @property
    def scale(self) -> float:
        """Return the factor of `B @ A`. It is the same for all adapters, since inference engines support no factor per
        adapter."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class Recipe:
    """The options of `mw.load` other than the model and the mesh.

    A recipe determines how a model is run. `memory`, `pipeline` and `context` change results by rounding only.
    """

    head: str = option(
        "lm", 'Which head is trained: "lm" the vocabulary; "value" one score per token, or one per label of a '
        'classifier, from `score.weight` and `score.bias`; a language model gets a new head; "none" no head.',
        choices=("lm", "value"),
    )  # fmt: skip
    labels: Sequence[str] = option(
        (), 'Names of the classes of a new `head="value"`, which becomes a classifier. A classifier names its own in '
        "config.json.", command=False, fixed=True,
    )  # fmt: skip
    dtype: "torch.dtype | None" = option(  # noqa: RUF009 - it makes a field
        None, "The compute dtype: `torch.bfloat16` (also None), `torch.float32`, `torch.float64`.", command=False,
    )  # fmt: skip
    train: str | Sequence[str] = option(
        "**", "Patterns of the parameters that are trained; all others are frozen. With `lora` adapters are trained, "
        'and what patterns other than "**" match.', command=False, fixed=True,
    )  # fmt: skip
    tower: bool = option(
        False, "Train the vision encoder too, as `train` says; batches may then hold images and videos. Otherwise "
        "its weights are kept unchanged.", fixed=True,
    )  # fmt: skip
    mtp: str = option(
        "carried", 'Whether the head for multi-token prediction (`mtp.*` of Qwen3-Next, 3.5 and newer) is trained. '
        '"carried" keeps its weights unchanged; "head" trains it alone, and the rest of the model exactly as without '
        'it; "all" trains the model by its loss too. A model without `mtp.*` gets a new head.',
        choices=("carried", "head", "all"), fixed=True,
    )  # fmt: skip
    mtp_weight: float = option(0.1, "The weight of the loss of the MTP head.")
    memory: MemoryOptions = option(MemoryOptions(), "Memory and communication options: `mw.MemoryOptions`.")
    pipeline: Pipeline = option(
        Pipeline(), "Stages and schedule, where the mesh has pp: `mw.Pipeline`.",
    )  # fmt: skip
    context: ContextParallel = option(
        ContextParallel(), "How mixers exchange tokens over cp: `mw.ContextParallel`.",
    )  # fmt: skip
    fp8: str | None = option(
        None, 'Compute matmuls in FP8, with one scale per block of 128 ("block").',
        choices=("block",),
    )  # fmt: skip
    fp8_skip: str | Sequence[str] = option((), "Patterns of the parameters whose matmuls stay in `dtype`.")
    lora: Lora | None = option(  # noqa: RUF009 - likewise
        None, "Train low-rank adapters instead of the matrices: `mw.Lora`. What `train` names is trained too.",
        fixed=True,
    )  # fmt: skip
    frozen: str | None = option(
        None, "Quantise frozen matrices to 4 bits while loading (QLoRA, arXiv 2305.14314): \"nf4\", \"nvfp4\" or "
        '"mxfp4". Matrices that their files hold in 8 or 4 bits stay so without it. Embedding, head, router and norms '
        "are not quantised. `tp` must leave columns in whole blocks of 64, 16 or 32.",
        choices=FOUR_BITS, fixed=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse values of the wrong type. Type checkers do not see values that come from files and notebooks."""
        for name, kind, example in (
            ("memory", MemoryOptions, "recompute='full'"), ("pipeline", Pipeline, "stages=2"),
            ("context", ContextParallel, "attention=1"),
        ):  # fmt: skip
            value = vars(self)[name]
            if not isinstance(value, kind):
                cls = f"mw.{kind.__name__}"
                raise ConfigError(f"{name}={value!r} must be {cls}(...), such as {cls}({example})")
        if self.lora is not None and not isinstance(self.lora, Lora):
            several = isinstance(self.lora, list | tuple | dict)
            why = "; several adapters of one model are not supported: merge all but one" if several else ""
            raise ConfigError(f"lora={self.lora!r:.200} must be mw.Lora(...), such as mw.Lora(rank=16), or None{why}")
        self._check_labels()
        if not isinstance(self.tower, bool):
            raise ConfigError(f"tower={self.tower!r} must be True or False")
        if self.mtp not in (known := ("carried", "head", "all")):
            raise ConfigError(f"mtp={self.mtp!r:.80} is unknown; choose from {', '.join(known)}")
        if type(self.mtp_weight) not in (int, float) or not 0 < self.mtp_weight < float("inf"):
            raise ConfigError(f"mtp_weight={self.mtp_weight!r:.80} must be a number above 0")
        if self.fp8 not in (None, "block"):
            raise ConfigError(
                f"fp8={self.fp8!r:.80} is unknown; give fp8='block', or leave it out for matmuls in dtype="
            )
        if self.frozen is not None and self.frozen not in FOUR_BITS:
            raise ConfigError(
                f"frozen={self.frozen!r:.80} is unknown; choose from {', '.join(FOUR_BITS)}, or leave it out to keep "
                "frozen matrices as their files have them"
            )
        patterns_of(self.train, "train")
        if patterns_of(self.fp8_skip, "fp8_skip") and self.fp8 is None:
            raise ConfigError(
                f"fp8_skip={self.fp8_skip!r} skips nothing without fp8='block'; give both, or leave it out"
            )

    def _check_labels(self) -> None:
        """Refuse labels that are not names, and labels without a value head."""
        given: object = self.labels
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) and each for each in given):
            raise ConfigError(f"labels={given!r:.200} must be a list of names")
        if given and (self.head != "value" or len(given) < 2 or len({*given}) < len(given)):
            raise ConfigError(f"labels={given!r:.200} must be two or more different names, for head='value'")

    def plain(self, **fields: Any) -> "Recipe":
        """Return a recipe of the same model and layout, without options for memory or speed."""
        return replace(self, memory=MemoryOptions(compiled=False), fp8=None, fp8_skip=(), **fields)

    def check_schedule(self) -> None:
        """Refuse options that contradict a schedule which delays weight gradients."""
        pipeline = self.pipeline
        if pipeline.schedule not in LATE:
            return
        if self.memory.compiled:
            raise ConfigError(
                f"schedule={pipeline.schedule!r} splits backward in two, and the backward of a compiled layer cannot "
                "be split; choose schedule='1f1b' or compiled=False"
            )
        if pipeline.hold is False:
            raise ConfigError(
                f"schedule={pipeline.schedule!r} with hold=False: delayed weight gradients would be reduced in each "
                "micro-batch; leave hold out, or choose schedule='1f1b'"
            )


class RecipeFields(TypedDict, total=False):
    """The fields of `Recipe` as keyword arguments, for type checkers. A test compares the two."""

    head: str
    labels: Sequence[str]
    dtype: "torch.dtype | None"
    train: str | Sequence[str]
    tower: bool
    mtp: str
    mtp_weight: float
    memory: MemoryOptions
    pipeline: Pipeline
    context: ContextParallel
    fp8: str | None
    fp8_skip: str | Sequence[str]
    lora: Lora | None
    frozen: str | None


def patterns_of(value: object, argument: str = "train") -> list[str]:
    """Return one or several patterns of names as a list. Refuse other types."""
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{argument}={value!r} must be a pattern of names, or a list of them, such as 'layers.*'")
    return list(patterns)


def matching(patterns: Iterable[str], names: Iterable[str], argument: str) -> list[str]:
    """Return the names that match any of the patterns, in their order. Refuse a pattern that matches none: it is a
    typo, and would train too little without an error."""
    names, matches = list(names), set[str]()
    for pattern in patterns:
        matched = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise ConfigError(
                f"{argument}={pattern!r} matches no parameter; names look like {names[0]}, and model.trainable of a "
                "model loaded without train= lists all of them"
            )
        matches |= matched
    return [name for name in names if name in matches]
