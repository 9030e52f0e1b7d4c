"""Check the fields of a run file against each other, which pydantic's checks of single fields cannot do.

Each function checks one topic and yields mistakes: the path of the field to change, and a sentence that ends with the
fix. Nothing is raised, so that all mistakes of a file come in one message. The checks are pure arithmetic on the
config: no file, model or device is touched (`preflight.py` does that).

A field that would have no effect is a mistake too: whoever wrote it expects one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from ..axes import Axes
from ..errors import ConfigError, MeshError
from ..objectives import OBJECTIVES
from ..sharding import hops
from .config import WARM_UP, Config, EvalSection, OptimSection, Place, SampleSection, SourceSection, to_toml
from .lr_schedule import refusal

Mistakes = Iterator[tuple[Place, str]]
MOST_STEPS = 10**9  # about 30 years at one step per second
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_CHAT_FIELDS = ("thinking", "turns", "template", "template_args")


def contradictions(config: Config) -> Mistakes:
    """Yield every contradiction between fields, with the path of the field to change."""
    for check in (
        _check_end, _check_step_size, _check_mesh, _check_pipeline, _check_shares, _check_sources, _check_names,
        _check_schedule, _check_evaluation, _check_samples, _check_profile, _check_checkpoints, _check_export,
        _check_restarts, _check_recipe, _check_optimizer_state, _check_objective, _check_teacher,
    ):  # fmt: skip
        yield from check(config)


def num_tokens(text: str | int) -> int | None:
    """Parse a number of tokens such as 2000, "2B" or "1.5k"; None if it is not one."""
    parsed = re.fullmatch(r"\s*([\d.]+)\s*([KMBT]?)\s*", str(text).upper())
    try:
        return round(float(parsed[1]) * _UNITS[parsed[2]]) if parsed else None
    except (ValueError, OverflowError):  # "1.2.3", or too large for a float
        return None


def num_steps(config: Config) -> int | None:
    """Return the number of steps if the config determines it; None with epochs, which depend on the data."""
    train = config.train
    if train.tokens is not None:
        return ceil((num_tokens(train.tokens) or 0) / train.step_tokens) or None
    return train.steps


def _check_end(config: Config) -> Mistakes:
    """Allow one way to say when the run ends, and a number of steps that a plan can hold."""
    train = config.train
    ends = [name for name in ("steps", "epochs", "tokens") if getattr(train, name) is not None]
    if len(ends) > 1:
        yield (
            ("train", ends[1]),
            f"{' and '.join(ends)} say when the run ends; give one (--set train.{ends[0]}= leaves it out)",
        )
    if train.tokens is not None and not num_tokens(train.tokens):
        yield ("train", "tokens"), f'{to_toml(train.tokens)} is not a number of tokens; write 2000000000 or "2B"'
    steps = num_steps(config) or 0
    if steps > MOST_STEPS:
        what = "" if train.tokens is None else f" of {train.step_tokens:,} tokens"
        yield (
            ("train", "steps" if train.tokens is None else "tokens"),
            f"{steps:,} steps{what} would take for ever; at most {MOST_STEPS:,} can be planned: give fewer",
        )


def _check_step_size(config: Config) -> Mistakes:
    """Require a whole number of micro-batches on each data rank, the same on all.

    All data ranks run the same collectives in a step, so none may have a micro-batch more. The message offers the
    nearest sizes and, for the size as it is, the data-parallel sizes that divide it.
    """
    length, ranks, step = config.train.length, config.mesh.num_data_ranks, config.train.step_tokens
    if step % (length * ranks) == 0:
        return
    smaller = max(1, step // (length * ranks)) * length * ranks
    fixes = [f"tokens_per_step = {smaller} or {smaller + length * ranks}"]
    if step % length == 0:
        divisors = [str(n) for n in range(1, step // length + 1) if step // length % n == 0]
        fixes.append(f"replicate x fsdp of {', '.join(divisors[:12])}{', ...' * (len(divisors) > 12)}")
    default = " (32 streams, the default)" * (config.train.tokens_per_step is None)
    yield (
        ("train", "tokens_per_step"),
        f"{step}{default} is not a multiple of length x data ranks, {length} x {ranks}; take {', or '.join(fixes)}",
    )


def _check_mesh(config: Config) -> Mistakes:
    """Require what the mesh needs of the length, and axes that fit each other.

    The ranks of cp x tp split each stream into equal parts (context and sequence parallelism).
    """
    length, parts = config.train.length, config.mesh.cp * config.mesh.tp
    if length % parts:
        shorter, axes = max(1, length // parts) * parts, "cp x tp" if config.mesh.cp > 1 else "tp"
        more = "" if config.train.tokens_per_step is None else ", and a multiple of it as tokens_per_step"
        yield (
            ("train", "length"),
            f"{length} tokens cannot be divided evenly over {axes} = {parts} ranks; take {shorter} or {shorter + parts}"
            f"{more}",
        )
    try:
        mesh = Axes(**config.mesh.model_dump())
        hops("", mesh.ep, mesh, config.train.token_once)
    except MeshError as error:
        yield ("mesh", "ep"), str(error)
    except ConfigError as error:
        yield ("train", "token_once"), str(error)


def _check_pipeline(config: Config) -> Mistakes:
    if config.mesh.pp == 1 and config.pipeline != type(config.pipeline)():
        yield ("pipeline",), "it configures pipeline stages, but the mesh has only one; set pp of [mesh] too"


def _check_shares(config: Config) -> Mistakes:
    """Require shares of all sources or of none, that add up to 1, and an end of the run in tokens.

    An epoch is defined by weights: with shares, a source may be read twice while another is not yet through.
    """
    shares = [data.share for data in config.data]
    actual = [share for share in shares if share is not None]
    if not actual:
        return
    with_share = next(n for n, share in enumerate(shares) if share is not None)
    if None in shares:
        yield (
            ("data", shares.index(None), "share"),
            "other sources have a share of the tokens; set it for all sources or for none",
        )
    elif abs(sum(actual) - 1) > 0.005:  # a third may be written 0.333
        yield (
            ("data", with_share, "share"),
            f"the shares of all sources add up to {sum(actual):.6g}; they must add up to 1",
        )
    if config.train.steps is None and config.train.tokens is None:
        yield ("data", with_share, "share"), "shares do not define epochs; set steps or tokens of [train]"
    for number, data in enumerate(config.data):
        if data.share is not None and data.weight != 1:
            yield ("data", number, "weight"), "share and weight both say how often a source is read; set one of them"


def sources_in(config: Config) -> Iterator[tuple[Place, SourceSection]]:
    """Yield all sources of a config, for training and held out, with the paths of their sections."""
    for number, data in enumerate(config.data):
        yield ("data", number), data
    yield ("eval",), config.eval
    for number, held_out in enumerate(config.eval.sets):
        yield ("eval", "sets", number), held_out


def _check_sources(config: Config) -> Mistakes:
    """Refuse empty paths, and fields that do nothing for this kind of source."""
    plain = SourceSection(path="")
    for place, source in sources_in(config):
        if source.path == [] or (source.path == "" and source is not config.eval):
            yield (*place, "path"), "it is empty; name a file or a directory"
        for name in _CHAT_FIELDS if source.kind != "chat" else ():
            if getattr(source, name) != getattr(plain, name):
                yield (
                    (*place, name),
                    f'it applies to chats, but the kind of this source is "{source.kind}"; leave it out',
                )
        if source.kind != "text" and source.split != plain.split:
            yield (
                (*place, "split"),
                f'it applies to texts, but the kind of this source is "{source.kind}"; leave it out',
            )


def _check_names(config: Config) -> Mistakes:
    """Require unique names: metrics are keyed by them."""
    for place, names in (
        (("data",), [data.name for data in config.data]),
        (("eval", "sets"), [held_out.name for held_out in config.eval.sets]),
    ):
        for number, name in enumerate(names):
            if name and name in names[:number]:
                yield (*place, number, "name"), f"another source has the name {to_toml(name)} too; choose another"
            if not name and "eval" in place:
                yield (*place, number, "name"), "a set has no name, which its metrics need; set one"


def _check_schedule(config: Config) -> Mistakes:
    """Refuse fields that the chosen schedule ignores, and a warm-up or decay longer than the run."""
    optim, steps, plain = config.optim, num_steps(config), OptimSection()
    if optim.schedule != "wsd" and optim.decay != plain.decay:
        yield ("optim", "decay"), f'it applies to the schedule "wsd", not to "{optim.schedule}"; leave one of them out'
    if optim.schedule == "constant" and optim.final != plain.final:
        yield ("optim", "final"), 'the schedule "constant" does not decay; leave one of them out'
    if mistake := refusal(optim, steps):
        yield ("optim", mistake[0]), mistake[1]


def _check_evaluation(config: Config) -> Mistakes:
    """Require held-out data, in one place, wherever a field depends on it."""
    section = config.eval
    if section.path and section.sets:
        yield ("eval", "sets"), "path and sets both name held-out data; set one of them"
    if not section.path and not section.sets:
        if section != EvalSection():
            yield (
                ("eval", "path"),
                "the section names nothing to evaluate; set path of [eval], or leave the section out",
            )
        if config.train.early_stopping:
            yield ("train", "early_stopping"), "it depends on evaluations, but the run makes none; set path of [eval]"


def _check_samples(config: Config) -> Mistakes:
    section = config.sample
    if not section.prompts and section != SampleSection():
        yield ("sample", "prompts"), "the section has nothing to sample from; set prompts, or leave the section out"
    if "" in section.prompts:
        number = section.prompts.index("")
        yield ("sample", "prompts"), f"prompt {number} is empty; a model needs at least one token to continue"


def _check_profile(config: Config) -> Mistakes:
    """Require a run long enough for the trace after its warm-up steps."""
    traced, steps = config.log.profile, num_steps(config)
    if traced and steps is not None and traced + WARM_UP > steps:
        fix = f"take at most {steps - WARM_UP}" if steps > WARM_UP else "leave it out"
        yield ("log", "profile"), f"{traced} steps after the first {WARM_UP}, and the run has {steps}; {fix}"


def _check_checkpoints(config: Config) -> Mistakes:
    """Require that `keep_every` selects checkpoints that are written, and would otherwise be deleted."""
    if config.save.keep_every is not None and config.save.keep == "all":
        yield ("save", "keep_every"), "all checkpoints stay anyway; leave one of them out"
    elif config.save.keep_every is not None and config.save.keep_every % config.save.every:
        yield (
            ("save", "keep_every"),
            f"{config.save.keep_every} is not a multiple of every = {config.save.every}: some of those steps have no "
            f"checkpoint; take {-(-config.save.keep_every // config.save.every) * config.save.every}",
        )


def _check_export(config: Config) -> Mistakes:
    """Require adapters to merge, and an export that merges them."""
    if config.save.merged and config.lora is None:
        yield ("save", "merged"), "it merges adapters, and the run has no [lora]; leave it out"
    elif config.save.merged and not config.save.export:
        yield ("save", "merged"), "it is written at the end of the run, and export = false writes nothing; set one"


def _check_restarts(config: Config) -> Mistakes:
    if config.launch.fewer and not config.launch.max_restarts:
        yield ("launch", "fewer"), "it says what a restart does, but the run makes none; set max_restarts too"


def place_of(text: str, config: Config, otherwise: Place) -> Place:
    """Return the path of the field that a message of the engine is about, else `otherwise`.

    The engine knows nothing of run files, but a message about one option begins with it: `tp=3 does not divide ...`.
    """
    word = re.match(r"(\w+)=", text)
    for section in ("mesh", "context", "pipeline", "train", "classify", "optim") if word else ():
        options = getattr(config, section)  # None for a section that is not there
        if word and options is not None and word[1] in type(options).model_fields:
            return section, word[1]
    return otherwise


def _check_recipe(config: Config) -> Mistakes:
    """Report what the constructors of `recipe.py` refuse: they hold the rules for how a model is run."""
    try:
        _ = config.recipe
    except ConfigError as error:
        yield place_of(str(error), config, ("train",)), str(error)


def _check_optimizer_state(config: Config) -> Mistakes:
    """Refuse options of another optimizer, and bfloat16 state with large betas: `optim/adamw.py` has the same limit.

    bfloat16 has 8 significant bits. With a larger beta the change of a moment in one step is less than half of the last
    bit: the moment stands still while the true one moves.
    """
    optim, plain = config.optim, OptimSection()
    if optim.kind == "muon" and optim.state_dtype == "uint8":
        yield ("optim", "state_dtype"), 'Muon has no state in 8 bits; take "bfloat16", or kind = "adamw"'
    for name in ("momentum", "by_head", "exclude", "matrix_dtype") if optim.kind != "muon" else ():
        if getattr(optim, name) != getattr(plain, name):
            yield ("optim", name), f'it is an option of kind = "muon", and this is "{optim.kind}"; leave it out'
    if optim.kind == "muon" and optim.state_dtype == "bfloat16" and optim.momentum > 0.98:
        yield ("optim", "state_dtype"), "the change of the momentum in one step is rounded away; take momentum <= 0.98"
    if config.optim.state_dtype == "bfloat16" and max(config.optim.betas) > 0.98:
        yield (
            ("optim", "state_dtype"),
            f"with betas = {to_toml(config.optim.betas)} the change of a moment in one step is rounded away; "
            'take betas of at most 0.98, or "float32" or "uint8"',
        )


def _check_objective(config: Config) -> Mistakes:
    """Refuse options of another objective, and fields that the rows of this one cannot follow."""
    for name in OBJECTIVES:
        if name != config.objective and getattr(config, name) is not None:
            yield (name,), f'the section applies to objective = "{name}", and this run has "{config.objective}"'
    if config.objective == "sft":
        return
    try:
        _ = config.objective_options
    except ConfigError as error:
        field = re.match(r"\w+\.(\w+)=", str(error))
        yield (config.objective, *([field[1]] if field else [])), str(error)
    for place, source in sources_in(config) if OBJECTIVES[config.objective].rows != "documents" else ():
        yield from (((*place, field), why) for field, why in _unfit(source))
        if config.objective in ("embedding", "rerank"):
            yield from (((*place, field), why) for field, why in _unread(source, config.objective))
    if config.train.mtp != "carried" and OBJECTIVES[config.objective].rows != "documents":
        yield (
            ("train", "mtp"),
            f'the MTP head learns the next token, which objective = "{config.objective}" does not train',
        )
    if config.sample.prompts and OBJECTIVES[config.objective].head != "lm":
        yield ("sample", "prompts"), f'objective = "{config.objective}" trains no model that writes; leave them out'


def _unread(source: SourceSection, objective: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of a source of queries and documents that would have no effect."""
    plain = SourceSection(path="")
    if objective == "rerank" and source.kind == "text":
        yield "kind", "a reranker reads queries and documents, in the chat template; leave it out"
    for name in _CHAT_FIELDS if objective == "embedding" else ("thinking",):
        if getattr(source, name) != getattr(plain, name):
            yield name, f'it has no effect on objective = "{objective}"; leave it out'


def _check_teacher(config: Config) -> Mistakes:
    """Require a teacher of a distillation, or its scores."""
    section = config.distill
    if section is not None and not section.teacher and not section.scores:
        yield (
            ("distill", "teacher"),
            "neither teacher nor scores says where the teacher's tokens come from; set one of them, or both",
        )


def _unfit(source: SourceSection) -> Iterator[tuple[str, str]]:
    """Yield the fields of a source that do not fit rows of several documents."""
    if source.kind == "tokens":
        yield "kind", "rows of token ids have one document each; give chats or texts"
    if source.turns != "each":
        yield "turns", "an answer is trained on as a whole; leave it out"
    if source.too_long == "cut":
        yield "too_long", 'the documents of a row belong together and are not cut; take "stop" or "drop"'
    if source.split != "file":
        yield "split", "rows of this objective are not plain files; leave it out"
