"""Fields that are right alone and wrong together. Each function tells of one matter, by place and sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from ..axes import Axes
from ..errors import ConfigError, MeshError
from ..sharding import hops
from .config import WARM_UP, Config, EvalSection, OptimSection, Place, SampleSection, SourceSection, written
from .lr_schedule import refusal

Told = Iterator[tuple[Place, str]]
MOST_STEPS = 10**9  # more would take 30 years at one a second
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_OF_CHATS = ("thinking", "turns", "template", "template_args")


def contradictions(config: Config) -> Told:
    for matter in (
        _of_the_end, _of_a_step, _of_the_mesh, _of_stages, _of_shares, _of_sources, _of_names, _of_the_schedule,
        _of_evaluation, _of_samples, _of_traces, _of_checkpoints, _of_restarts, _of_the_recipe, _of_moments,
    ):  # fmt: skip
        yield from matter(config)


def num_tokens(text: str | int) -> int | None:
    """`2B` as a number."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMBT]?)\s*", str(text).upper())
    try:
        return round(float(found[1]) * _UNITS[found[2]]) if found else None
    except (ValueError, OverflowError):
        return None


def num_steps(config: Config) -> int | None:
    """Where the config says it alone; with epochs the data says it."""
    train = config.train
    if train.tokens is not None:
        return ceil((num_tokens(train.tokens) or 0) / train.step_tokens) or None
    return train.steps


def _of_the_end(config: Config) -> Told:
    train = config.train
    ends = [name for name in ("steps", "epochs", "tokens") if getattr(train, name) is not None]
    if len(ends) > 1:
        yield (
            ("train", ends[1]),
            f"{' and '.join(ends)} say when the run ends; give one (--set train.{ends[0]}= leaves it out)",
        )
    if train.tokens is not None and not num_tokens(train.tokens):
        yield ("train", "tokens"), f'{written(train.tokens)} is no number of tokens; write 2000000000 or "2B"'
    steps = num_steps(config) or 0
    if steps > MOST_STEPS:
        what = "" if train.tokens is None else f" of {train.step_tokens:,} tokens"
        yield (
            ("train", "steps" if train.tokens is None else "tokens"),
            f"{steps:,} steps{what} would take for ever; at most {MOST_STEPS:,} can be planned: give fewer",
        )


def _of_a_step(config: Config) -> Told:
    length, ranks, step = config.train.length, config.mesh.num_data_ranks, config.train.step_tokens
    if step % (length * ranks) == 0:
        return
    fits = max(1, step // (length * ranks)) * length * ranks
    ways = [f"tokens_per_step = {fits} or {fits + length * ranks}"]
    if step % length == 0:
        fitting = [str(n) for n in range(1, step // length + 1) if step // length % n == 0]
        ways.append(f"replicate x fsdp of {', '.join(fitting[:12])}{', ...' * (len(fitting) > 12)}")
    default = " (32 streams, the default)" * (config.train.tokens_per_step is None)
    yield (
        ("train", "tokens_per_step"),
        f"{step}{default} is no multiple of length x data ranks, {length} x {ranks}; take {', or '.join(ways)}",
    )


def _of_the_mesh(config: Config) -> Told:
    length, share = config.train.length, config.mesh.cp * config.mesh.tp
    if length % share:
        fits, axes = max(1, length // share) * share, "cp x tp" if config.mesh.cp > 1 else "tp"
        more = "" if config.train.tokens_per_step is None else ", and a multiple of it as tokens_per_step"
        yield (
            ("train", "length"),
            f"{length} tokens cannot be shared out evenly over {axes} = {share} ranks; take {fits} or {fits + share}"
            f"{more}",
        )
    try:
        mesh = Axes(**config.mesh.model_dump())
        hops("", mesh.ep, mesh, config.train.token_once)
    except MeshError as error:
        yield ("mesh", "ep"), str(error)
    except ConfigError as error:
        yield ("train", "token_once"), str(error)


def _of_stages(config: Config) -> Told:
    if config.mesh.pp == 1 and config.pipeline != type(config.pipeline)():
        yield ("pipeline",), "it says how a step goes through pipeline stages, and there is one; give pp of [mesh] too"


def _of_shares(config: Config) -> Told:
    shares = [data.share for data in config.data]
    given = [share for share in shares if share is not None]
    if not given:
        return
    with_share = next(n for n, share in enumerate(shares) if share is not None)
    if None in shares:
        yield ("data", shares.index(None), "share"), "other sources have a share of the tokens; give all one or none"
    elif abs(sum(given) - 1) > 0.005:  # thirds are written 0.333
        yield ("data", with_share, "share"), f"the shares of all sources are {sum(given):.6g} together; make it 1"
    if config.train.steps is None and config.train.tokens is None:
        yield ("data", with_share, "share"), "with shares there are no epochs; give steps or tokens of [train]"
    for number, data in enumerate(config.data):
        if data.share is not None and data.weight != 1:
            yield ("data", number, "weight"), "share and weight both say how often a source is seen; give one"


def sources_in(config: Config) -> Iterator[tuple[Place, SourceSection]]:
    """Return all sources of a config, those to train on and those held out, with their places."""
    for number, data in enumerate(config.data):
        yield ("data", number), data
    yield ("eval",), config.eval
    for number, held_out in enumerate(config.eval.sets):
        yield ("eval", "sets", number), held_out


def _of_sources(config: Config) -> Told:
    """What would have no effect is refused: somebody meant something by it."""
    plain = SourceSection(path="")
    for place, source in sources_in(config):
        if source.path == [] or (source.path == "" and source is not config.eval):
            yield (*place, "path"), "it is empty; name a file or a directory"
        for name in _OF_CHATS if source.kind != "chat" else ():
            if getattr(source, name) != getattr(plain, name):
                yield (*place, name), f'it is of chats, and the kind of this source is "{source.kind}"; leave it out'
        if source.kind != "text" and source.split != plain.split:
            yield (*place, "split"), f'it is of texts, and the kind of this source is "{source.kind}"; leave it out'


def _of_names(config: Config) -> Told:
    for place, names in (
        (("data",), [data.name for data in config.data]),
        (("eval", "sets"), [held_out.name for held_out in config.eval.sets]),
    ):
        for number, name in enumerate(names):
            if name and name in names[:number]:
                yield (*place, number, "name"), f"another source is called {written(name)} too; choose another name"
            if not name and "eval" in place:
                yield (*place, number, "name"), "a set has no name, and metrics are told by it; give it one"


def _of_the_schedule(config: Config) -> Told:
    optim, steps, plain = config.optim, num_steps(config), OptimSection()
    if optim.schedule != "wsd" and optim.decay != plain.decay:
        yield ("optim", "decay"), f'it is of the schedule "wsd", not of "{optim.schedule}"; leave one of them out'
    if optim.schedule == "constant" and optim.final != plain.final:
        yield ("optim", "final"), 'the schedule "constant" does not fall; leave one of them out'
    if wrong := refusal(optim, steps):
        yield ("optim", wrong[0]), wrong[1]


def _of_evaluation(config: Config) -> Told:
    section = config.eval
    if section.path and section.sets:
        yield ("eval", "sets"), "path and sets both name held-out data; give one"
    if not section.path and not section.sets:
        if section != EvalSection():
            yield ("eval", "path"), "there is nothing to evaluate; give path of [eval], or leave the section out"
        if config.train.early_stopping:
            yield ("train", "early_stopping"), "it looks at evaluations, and there are none; give path of [eval]"


def _of_samples(config: Config) -> Told:
    section = config.sample
    if not section.prompts and section != SampleSection():
        yield ("sample", "prompts"), "there is nothing to sample from; give prompts, or leave the section out"
    if "" in section.prompts:
        number = section.prompts.index("")
        yield ("sample", "prompts"), f"prompt {number} is empty; a model needs a word to go on from"


def _of_traces(config: Config) -> Told:
    wanted, steps = config.log.profile, num_steps(config)
    if wanted and steps is not None and wanted + WARM_UP > steps:
        ways = f"take at most {steps - WARM_UP}" if steps > WARM_UP else "leave it out"
        yield ("log", "profile"), f"{wanted} steps after the first {WARM_UP}, and the run has {steps}; {ways}"


def _of_checkpoints(config: Config) -> Told:
    if config.save.keep_every is not None and config.save.keep == "all":
        yield ("save", "keep_every"), "all checkpoints stay anyway; leave one of them out"
    elif config.save.keep_every is not None and config.save.keep_every % config.save.every:
        yield (
            ("save", "keep_every"),
            f"{config.save.keep_every} is no multiple of every = {config.save.every}: some of those steps have no "
            f"checkpoint; take {-(-config.save.keep_every // config.save.every) * config.save.every}",
        )


def _of_restarts(config: Config) -> Told:
    if config.launch.fewer and not config.launch.max_restarts:
        yield ("launch", "fewer"), "it says what a restart does, and there are none; give max_restarts too"


def place_of(text: str, config: Config, otherwise: Place) -> Place:
    """Return the field of an objection, which begins with the name and value of a field where it is of one field."""
    word = re.match(r"(\w+)=", text)
    for section in ("mesh", "context", "pipeline", "train") if word else ():
        if word and word[1] in type(getattr(config, section)).model_fields:
            return section, word[1]
    return otherwise


def _of_the_recipe(config: Config) -> Told:
    try:
        _ = config.recipe
    except ConfigError as error:
        yield place_of(str(error), config, ("train",)), str(error)


def _of_moments(config: Config) -> Told:
    if config.optim.state_dtype == "bfloat16" and max(config.optim.betas) > 0.98:
        yield (
            ("optim", "state_dtype"),
            f"with betas = {written(config.optim.betas)} the change of a moment in a step would be rounded away; "
            'take betas of at most 0.98, or "float32" or "uint8"',
        )
