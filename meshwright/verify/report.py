"""Report what `verify` measured: on the terminal, as JSON and as a page.

All three begin with the verdict, and list what was not tried: a pass proves only what ran. Findings of identical layers
share a line, since one mistake in a layer's code is in all of them.

In this module a part is a run (a dtype, transformers, or the weights) and a row is RUN or an oracle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ..errors import counted
from ..models import text_config
from ..plan import Figures, objections, work_of
from ..plan.html import Cell, details, flowing, page, section, table, tag, wrap
from ..plan.page import heading, plan_of, verdict_box
from ..recipe import MemoryOptions
from ..sharding import ORDERS, ways
from .collective_checks import same_kind
from .exports import in_blocks
from .planted_bugs import bug
from .results import Finding, Margin
from .run_oracles import ORACLES
from .session import FULL, IN_BLOCKS, PEFT, RUN, SHRUNK, TRANSFORMERS, WEIGHTS, Plan, RunResult, lacks_head, memory_of

ROWS = (RUN, *ORACLES)
# Columns of the terminal.
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", TRANSFORMERS: "hf", PEFT: "peft"}
_KINDS = 3  # number of names that are printed for an oracle


def rows_of(parts: Sequence[RunResult]) -> list[str]:
    """Return the rows of the table: RUN, then the oracles that some run checks, in order."""
    checked = {oracle for part in parts for oracle in part.oracles}
    return [RUN, *(oracle for oracle in ORACLES if oracle in checked)]


def oracle_sentence(row: str) -> str:
    """Return what holds if an oracle passes: the first sentence of its docstring."""
    if row == RUN:
        return "Every rank reaches the end of the run."
    text = " ".join((ORACLES[row].__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def print_oracles() -> None:
    """Print what each oracle checks, for `--list`."""
    grid = Grid("oracle", "holds if", box=None)
    for oracle in ROWS:
        grid.add_row(oracle, oracle_sentence(oracle))
    Console().print(grid)
    Console().print("--weights checks RUN, L1 and W1 of the real weights, and trains nothing.")


def print_table(model: str, plan: Plan, parts: Sequence[RunResult]) -> None:
    """Print the verdict, a line per oracle, then the failures with their likely causes, and where to begin."""
    console = Console()
    console.print(Text("; ".join(filter(None, headline(plan, parts)))), soft_wrap=True)
    grid = Grid(box=None, pad_edge=False, expand=True, title=Text(_title(model, plan)), title_justify="left")
    grid.add_column("", width=3)
    rows = rows_of(parts)
    for part in parts:
        title = SHORT.get(part.name, part.name)
        grid.add_column(title, no_wrap=True, width=max(len(title), *(len(cell(part, row)) for row in rows)))
    grid.add_column("compared, and how far off the worst is", overflow="fold", ratio=1)
    for oracle in rows:
        cells = (_styled(cell(part, oracle)) for part in parts)
        grid.add_row(oracle, *cells, Text(margin_text(parts, oracle)))
    if planted(plan):
        console.print(planted(plan), soft_wrap=True)
    if changed := shrunk(plan):
        sizes = ", ".join(f"{name} {'unset' if was is None else was} -> {now}" for name, (was, now) in changed.items())
        console.print(f"Verified a small random model instead ({sizes}). Use --full for the real one.", soft_wrap=True)
    console.print(grid)
    for part in parts:
        for line in finding_lines(part):
            console.print(Text(f"{part.name} {line}"), soft_wrap=True)  # unbroken, so that grep works
        for note in part.notes:
            console.print(Text(f"{part.name}: {note}"), soft_wrap=True)
    num = sum(len(part.findings) for part in parts)
    seconds = sum(part.seconds for part in parts)
    console.print(f"{'all is well' if not num else f'findings: {num}'}, {seconds:.1f} s")
    for text in filter(None, (beginning(parts), unproven(plan, parts))):
        console.print(text, soft_wrap=True, markup=False)


def headline(plan: Plan, parts: Sequence[RunResult]) -> tuple[str, str]:
    """Return the verdict in one line, and its evidence: the number of findings, or the largest error measured."""
    rows, on = rows_of(parts), str(plan.axes)
    # A row fails if any run fails it; it counts as not answered only if no run finished it.
    fail = [row for row in rows if any(findings_of(part, row) for part in parts)]
    if not fail:
        return f"{counted(len(rows), 'check')} on {on}: all is well", _worst(parts)
    silent = sum(all(cell(part, row) in ("-", "") for part in parts) for row in rows)
    num = sum(len(part.findings) for part in parts)
    unanswered = f"; {counted(silent, 'check was', 'checks were')} not answered" if silent else ""
    verb = "fails" if len(fail) == 1 else "fail"
    return (
        f"{len(fail)} of {counted(len(rows), 'check')} on {on} {verb}: {', '.join(fail)}",
        f"findings: {num}{unanswered}",
    )


def _worst(parts: Sequence[RunResult]) -> str:
    """Return the largest error of a gradient in the first run that compared gradients, which is float64, the proof.
    Without gradients, return the largest of all errors, as a share of its bound."""
    margins = [margin for part in parts for margin in part.margins if margin.allowed]
    gradients = next(([m for m in part.margins if m.oracle == "G1" and m.allowed] for part in parts), [])
    if not margins:
        return ""
    worst = max(gradients or margins, key=lambda margin: margin.share)
    what = "worst gradient" if gradients else f"worst of {worst.count:,} {worst.what}"
    return f"{what} {worst.worst:.1e} off, {worst.allowed:.0e} allowed"


def _title(model: str, plan: Plan) -> str:
    """Return the title of a run: the model, the mesh, and how pipeline and context parallelism divide the work."""
    schedule = f", schedule {plan.runs.recipe.pipeline.schedule}" if plan.axes.pp > 1 else ""
    context = ways(plan.runs.spec, plan.axes)
    return f"{model} on {plan.axes}{schedule}{context and f', {context}'}{adapters(plan)}"


def adapters(plan: Plan) -> str:
    """Describe the adapters of the run; "" without any."""
    lora = plan.runs.recipe.lora
    if lora is None:
        return ""
    num = sum(param.adapter for param in plan.runs.table)
    experts = f" ({lora.expert_rank} for experts)" if lora.expert_rank else ""
    return f", adapters of rank {lora.rank}{experts}, scale {lora.scale:.3g}, {counted(num, 'factor')}"


def planted(plan: Plan) -> str:
    """Return a sentence about the planted bug; "" without one."""
    name = plan.options.plant
    return f"A bug is planted in the ranks of the mesh: {bug(name).what} ({name})." if name else ""


def margin_text(parts: Sequence[RunResult], oracle: str) -> str:
    """Return what an oracle compared and its largest error, from the first run with margins for it.

    By default that is float64, the strictest. Exact comparisons are printed only if the oracle makes no other
    comparisons.
    """
    for part in parts:
        if margins := margins_of(part, oracle):
            return str(max(margins, key=lambda margin: (margin.allowed > 0, margin.share, margin.count)))
    return ""


def margins_of(part: RunResult, oracle: str) -> list[Margin]:
    """Return the margins of an oracle. If it fails, exact comparisons are left out.

    Their margins count what was compared, whatever the outcome, so "all equal" would appear next to a failure.
    """
    fails = bool(findings_of(part, oracle))
    return [m for m in part.margins if m.oracle == oracle and not (fails and not m.allowed)]


def shrunk(plan: Plan) -> dict[str, tuple[Any, int]]:
    """Return the sizes of config.json that the small model changes, as (real, small)."""
    was, now = text_config(plan.blueprint.config), text_config(plan.runs.config)
    return {name: (was.get(name), n) for name, n in now.items() if isinstance(n, int) and n != was.get(name)}


def finding_lines(part: RunResult, rest: str = "--json has them all") -> list[str]:
    """Return the first findings of each oracle, with a line for all layers that share one. `rest`: where the rest can
    be read."""
    lines = []
    for oracle in rows_of([part]):
        kinds: dict[str, list[Finding]] = {}
        for finding in findings_of(part, oracle):
            kinds.setdefault(same_kind(finding.name), []).append(finding)
        for kind, (first, *others) in list(kinds.items())[:_KINDS]:
            lines.append(f"{first}{f' (the first of {len(others) + 1} in {kind})' if others else ''}")
        left = list(kinds.values())[_KINDS:]
        if left:
            lines.append(f"{oracle} and {sum(map(len, left))} more of {len(left)} other names: {rest}")
    return lines


def beginning(parts: Sequence[RunResult]) -> str:
    """Return which finding to look at first; "" if only one oracle fails.

    It is the finding of the earliest oracle, because mistakes spread to later ones, together with that of the bill
    (K1). The bill comes last but does not depend on values, so it may name the exact door.
    """
    findings = next((part.findings for part in parts if part.findings), [])
    firsts: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda f: ROWS.index(f.oracle)):
        firsts.setdefault(finding.oracle, finding)
    if len(firsts) < 2:
        return ""
    first = next(iter(firsts.values()))
    bill = f", and with K1 {firsts['K1'].name}" if "K1" in firsts else ""
    return f"begin with {first.oracle} {first.name}{bill}: the others may be consequences"


def unproven(plan: Plan, parts: Sequence[RunResult]) -> str:
    """Return what these runs did not try, in one line."""
    left = untried(plan, parts)
    return f"not tried: {'; '.join(left)}" if left else ""


def _idle(plan: Plan) -> list[str]:
    """Return the axes of size 1; a run proves nothing about these. ep counts only with experts."""
    experts = ["ep"] if plan.blueprint.balance.num_experts else []
    return [axis for axis in ("pp", "replicate", "fsdp", "cp", "tp", *experts) if plan.axes.size_of(axis) == 1]


def _other_meshes(plan: Plan) -> str:
    """Return small meshes that try the idle axes, at most three at once. ep needs ranks of fsdp, cp or tp."""
    axes = [axis for axis in _idle(plan) if axis != "ep"]
    meshes = [axes[at : at + 3] for at in range(0, len(axes), 3)] or [[]]
    if "ep" in _idle(plan):
        meshes[-1] += [*([] if {"fsdp", "cp", "tp"} & {*meshes[-1]} else ["fsdp"]), "ep"]
    return ", then ".join("--mesh " + ",".join(f"{axis}=2" for axis in mesh) for mesh in meshes)


def untried(plan: Plan, parts: Sequence[RunResult]) -> list[str]:
    """Return the features of Meshwright that the oracles of this run did not cover. Every output includes it.

    Without it a reader would take a pass for more than it is: a bug in the router's aux loss once passed, because no
    config of the run trained it.
    """
    if plan.kind == WEIGHTS:
        return ["all but the loading of weights"]
    unsupported = [what for part in parts for what in part.untried]
    return [
        *_untried_axes(plan),
        *_larger(plan),
        *_left_out(plan),
        *unsupported,
        *_untried_experts(plan),
        *_untried_schedules(plan),
        *(["other ways of cp for a mixer (--context)"] if plan.axes.cp > 1 else []),
        *_untried_options(plan),
    ]


def _untried_options(plan: Plan) -> Iterator[str]:
    """Yield the options that kept their default in every run."""
    plain, runs = asdict(MemoryOptions()), [asdict(memory_of(plan, dtype)) for dtype in plan.options.dtypes]
    of_experts = () if plan.blueprint.balance.num_experts else ("token_once",)
    left = [name for name, value in plain.items() if all(run[name] == value for run in runs)]
    yield f"{', '.join(name for name in left if name not in of_experts)} of mw.MemoryOptions (try --recompute full ...)"
    state = "" if plan.options.optimizer.state_dtype else "state_dtype and "
    yield f"{state}other options of mw.load and mw.Engine"


def _untried_axes(plan: Plan) -> Iterator[str]:
    """Yield the axes of size 1, with meshes that try them."""
    idle = _idle(plan)
    if plan.axes.world == 1:
        yield f"a mesh: one process was compared with itself (try {_other_meshes(plan)})"
    elif idle:
        yield f"{', '.join(idle)}, of size 1 on this mesh (try {_other_meshes(plan)})"


def _larger(plan: Plan) -> Iterator[str]:
    """Yield the axes of size 2 for which a larger size fits the model.

    With two ranks each is the first or the last, so a mistake about a rank in the middle does not show.
    """
    larger = {"pp": {"pp": 3}, "fsdp": {"fsdp": 4}, "cp": {"cp": 4}, "tp": {"tp": 4}, "ep": {"fsdp": 4, "ep": 4}}
    can = {
        axis: "--mesh " + ",".join(f"{name}={size}" for name, size in sizes.items())
        for axis, sizes in larger.items()
        if plan.axes.size_of(axis) == 2 and not objections(plan.blueprint, sizes)
    }
    if can:
        why = "of 2 ranks each is the first or the last, and cuts fall in the middle"
        yield f"larger sizes of {', '.join(can)}: {why} (try {', then '.join(can.values())})"


def _left_out(plan: Plan) -> Iterator[str]:
    """Yield what the options of this run leave out."""
    options = plan.options
    if "float64" not in options.dtypes:
        yield "the proof: float64, which --dtypes leaves out"
    if options.against != TRANSFORMERS:
        yield "M1 and R1, which compare one process with transformers (--against none)"
    elif options.recipe.head != "lm":
        yield "the head against transformers: M1 takes a language model"
    if plan.kind != FULL and options.optimizer.state_dtype:
        yield "O1, because a plain optimizer does not round its state (--state-dtype)"
    if plan.kind != FULL and not in_blocks(plan.runs):
        yield f"exports in FP8 (try {'--fp8' if in_blocks(plan.blueprint) else IN_BLOCKS})"
    if plan.runs.recipe.lora is not None:
        yield "gradients of the base, which is frozen (leave --lora out)"
        yield from ["M2, which compares adapters with peft (--against none)"] if options.against != TRANSFORMERS else []
        yield from ["outputs of the base, E3 (--full)"] if plan.kind == FULL else []
        if lacks_head(plan.blueprint) or plan.runs.recipe.mtp != "carried":
            yield "outputs without adapters and adapter files, since a head is trained too"
    if plan.kind == FULL:
        yield "gradients after the first step, weights before the last update, O1, H1, E2 and new weights (--full)"
        yield from ["Q1, each FP8 matmul (--full)"] if options.recipe.fp8 else []
        yield "these weights against transformers: M1 takes a small random model of the family"


def _untried_experts(plan: Plan) -> Iterator[str]:
    """Yield what was not tried of experts: the aux loss is trained only if config.json says so."""
    balance = plan.blueprint.balance
    if balance.num_experts and not balance.coefficient:
        yield "the router's aux loss, which config.json leaves out (output_router_logits, router_aux_loss_coef)"
    elif balance.num_experts:
        yield from ['router_aux="previous"'] if plan.axes.pp == 1 else []  # a pipeline uses it, and refuses "pooled"
    elif plan.axes.ep > 1:
        yield "ep, which changes nothing in a model without experts"


def _untried_schedules(plan: Plan) -> Iterator[str]:
    """Yield the pipeline schedules that were not tried, and the stages of a model that is too deep to shrink."""
    pipeline = plan.runs.recipe.pipeline
    if plan.axes.pp == 1:
        return
    others = [name for name in ORDERS if name != pipeline.schedule]
    yield f"the schedules {' and '.join(others)} (--schedule)"
    if pipeline.ends != (ends := plan.options.recipe.pipeline.ends):
        yield f"stages that end after {ends} layers: the small model is not so deep (try --full)"


def cell(part: RunResult, row: str) -> str:
    """Return the result of an oracle in a run.

    "" if the run does not check it; "-" if it did not finish, because the run stopped or an earlier check failed.
    """
    findings = findings_of(part, row)
    if row != RUN and row not in part.oracles:
        return ""
    if findings:
        return f"FAILS ({len(findings)})"
    return "pass" if row == RUN or row in part.ended else "-"


def _styled(text: str) -> Text:
    """Color a cell for the terminal."""
    return Text(text, style={"pass": "green", "-": "", "": ""}.get(text, "bold red"))


def findings_of(part: RunResult, oracle: str) -> list[Finding]:
    """Return the findings of an oracle in a run."""
    return [f for f in part.findings if f.oracle == oracle]


def report_json(model: str, plan: Plan, parts: Sequence[RunResult], origin: Mapping[str, str]) -> dict[str, Any]:
    """Return the result for a program. `origin`: versions, date and command line."""
    return {
        **origin,
        "model": model,
        "mesh": str(plan.axes),
        "ranks": plan.axes.world,
        "pipeline": asdict(plan.runs.recipe.pipeline) if plan.axes.pp > 1 else None,
        "context": ways(plan.runs.spec, plan.axes),
        "head": plan.options.recipe.head,
        "lora": None if plan.runs.recipe.lora is None else asdict(plan.runs.recipe.lora),
        "ok": not any(part.findings for part in parts),
        "planted": plan.options.plant,
        "shrunk": shrunk(plan),
        "untried": untried(plan, parts),
        "runs": [
            {
                "dtype": part.name,
                "seconds": round(part.seconds, 2),
                "notes": list(part.notes),
                "oracles": {row: _rows(part, row) for row in rows_of([part])},
                "margins": {row: [asdict(margin) for margin in margins_of(part, row)] for row in rows_of([part])},
            }
            for part in parts
        ],
    }


def _rows(part: RunResult, row: str) -> list[dict[str, str]] | None:
    """Return the findings of an oracle; None if it did not finish (`cell` is "-")."""
    if cell(part, row) == "-":
        return None
    return [{"name": f.name, "what": f.what, "guess": f.guess} for f in findings_of(part, row)]


_MOST_FINDINGS = 50


def verify_page(plan: Plan, parts: Sequence[RunResult], origin: Mapping[str, str]) -> str:
    """Return the HTML page: the verdict and the findings, above the plan of the real sizes."""
    # The plan on the page is of the real model, whatever ran.
    work = work_of(plan.axes, None, plan.num_batches if plan.axes.pp > 1 else 1)
    figures = Figures(plan.model, plan.blueprint, plan.axes, work)
    title = f"{figures.name} on {figures.axes}"
    return page(title, origin, heading("verify", figures), results(plan, parts), plan_of(figures))


def results(plan: Plan, parts: Sequence[RunResult]) -> Iterator[str]:
    """Yield the sections of the page about this run."""
    verdict, more = headline(plan, parts)
    well = not any(part.findings for part in parts)
    yield verdict_box(verdict, well, more, beginning(parts), unproven(plan, parts))
    yield section(
        "What was checked", tag("p", f"{planted(plan)} {_what_ran(plan)}".strip()), _oracles(parts), *_findings(parts)
    )


def _oracles(parts: Sequence[RunResult]) -> str:
    """Return the table of oracles, with a column for each run."""
    names = [f"{part.name}, {part.seconds:.1f} s" for part in parts]
    rows = (
        [Cell(row, "name"), Cell(oracle_sentence(row), "sentence"), *(_result(part, row) for part in parts)]
        for row in rows_of(parts)
    )
    return table(["oracle", "holds if", *names], rows, "stacked oracles")


def _result(part: RunResult, row: str) -> Cell:
    """Return the cell of an oracle in a run, with its margins as a note."""
    text, figures = cell(part, row), "\n".join(map(str, margins_of(part, row)))
    return Cell(text, {"pass": "pass", "-": "", "": ""}.get(text, "fails"), note=figures if text == "pass" else "")


def _findings(parts: Sequence[RunResult]) -> Iterator[str]:
    """Yield the notes and first findings of each run, and a fold with all findings where some are left out."""
    for part in parts:
        yield from (tag("p", f"{part.name}: {note}") for note in part.notes)
        lines = finding_lines(part, "all are listed below")
        yield from (_finding(part, line) for line in lines)
        if not {str(finding) for finding in part.findings} <= set(lines):
            yield details(f"All {len(part.findings)} findings of {part.name}", *_every_finding(part))


def _every_finding(part: RunResult) -> Iterator[str]:
    """Yield all findings of a run, at most 50 per oracle, since one bug may cause hundreds."""
    for row in rows_of([part]):
        findings = findings_of(part, row)
        yield from (_finding(part, str(finding)) for finding in findings[:_MOST_FINDINGS])
        if len(findings) > _MOST_FINDINGS:
            yield wrap("p", flowing(f"and {len(findings) - _MOST_FINDINGS} more of {row}: --json has them all"))


def _finding(part: RunResult, line: str) -> str:
    return wrap("pre", flowing(f"{part.name} {line}"), kind="finding")


def _what_ran(plan: Plan) -> str:
    """Say which model ran: the real one, or a small one in its place and what differs."""
    if plan.kind != SHRUNK:
        return f"The real model and its weights, from {plan.blueprint.directory}."
    changed = [f"{name} {'unset' if was is None else was} → {now}" for name, (was, now) in shrunk(plan).items()]
    if not changed:
        return "The model is small already; its weights were drawn."
    return (
        "The oracles ran on a small model with the same kinds of layers, heads, experts and files, and random weights: "
        f"{', '.join(changed)}. Everything else on this page is about the real model."
    )
