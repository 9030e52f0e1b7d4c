"""Every bug of tests/plants.py is found, and the first finding that is printed names its cause."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.engine.bill import step_bill
from meshwright.errors import RankError
from meshwright.verify import Recorder, Trial
from meshwright.verify.oracles import place_of
from meshwright.verify.report import ROWS
from tests import plants, tiny, trials, worlds

AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)


@dataclass(frozen=True)
class Planted:
    """`first`: a pattern for the first finding that is printed. `also`: patterns for others."""

    plant: Callable[[pytest.MonkeyPatch], None]
    model: str
    mesh: dict[str, int]
    first: str
    also: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)  # of the config


FSDP, TP, EP = dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2)
SHARE = "one rank's share of it, a sum over {} is missing"
FLOAT32 = r"\. Wrong are the float32 parameters, and no others"

PLANTS = {
    "no sum over tp": Planted(
        plants.no_rest,
        "qwen3",
        TP,
        "G1 model.norm.weight: .*" + SHARE.format("tp"),
        (
            r"G2 \S*norm\.weight: the gradient of ranks \[0, 1\] differs along tp: is a sum over tp missing",
            r"K1 all_reduce: 2 among ranks \[0, 1\] \(.*tp.*: 1 left out .* \(the last sums of gradients -1\)",
            r"U1 loss of step 1: .*: the gradients are wrong, see G1",
        ),
    ),
    "no sum of routers over tp": Planted(
        plants.no_rest,
        "qwen3_moe",
        TP,
        "G1 model.norm.weight: .*" + SHARE.format("tp"),
        (
            r"G1 \S*layers\.2\.mlp\.gate\.weight: .*" + SHARE.format("tp"),
            r"G2 layers\.2\.mlp\.router: the gradient of ranks \[0, 1\] differs along tp",
            r"G2 layers\.2\.mlp\.router: the weight of ranks \[0, 1\] differs along tp",
        ),
    ),
    "no sum of a delta net's norm over tp": Planted(
        plants.no_rest,
        "qwen3_5",
        TP,
        "G1 model.norm.weight: .*" + SHARE.format("tp"),
        (r"G1 \S*layers\.2\.linear_attn\.norm\.weight: .*" + SHARE.format("tp"),),
    ),
    "no sum of float32 parameters over fsdp": Planted(
        plants.no_rest, "qwen3_5", FSDP, r"G1 \S*layers\.2\.linear_attn\.\w*[^:]*: .*" + SHARE.format("fsdp") + FLOAT32
    ),
    "no sum of float32 parameters over fsdp and tp": Planted(
        plants.no_rest,
        "qwen3_5",
        dict(fsdp=2, tp=2),
        "G1 model.norm.weight: .*" + SHARE.format("tp"),
        (
            r"G1 \S*layers\.0\.linear_attn\.norm\.weight: .*" + SHARE.format("fsdp and tp"),
            r"G1 \S*layers\.0\.linear_attn\.A_log: .*" + SHARE.format("fsdp"),
        ),
    ),
    "no sum over fsdp": Planted(
        plants.own_share_of_fsdp, "qwen3", FSDP, r"G1 model\.norm\.weight: .* a sum over fsdp is missing"
    ),
    "no sum of float32 parameters over replicas": Planted(
        plants.float32_left_to_fsdp,
        "qwen3_5",
        dict(replicate=2),
        r"G1 \S*layers\.2\.linear_attn\.norm\.weight: .*" + SHARE.format("replicate") + FLOAT32,
        (r"K1 all_reduce: \d+ among ranks \[0, 1\] .*: 1 left out .* \(the last sums of gradients -1\)",),
    ),
    "no sum over replicas": Planted(
        plants.replicas_never, "qwen3", dict(replicate=2), r"G1 model\.norm\.weight: .*" + SHARE.format("replicate")
    ),
    "no sum over replicas is asked for": Planted(
        plants.replicas_never_asked,
        "qwen3",
        dict(replicate=2),
        r"RUN .*got no gradient, as (\d+) of \1 parameters.*kept from its sums over fsdp, or from those over replicate",
    ),
    "no sum of kv copies": Planted(
        plants.rest_without_matrices,
        "qwen3",
        TP,
        r"G1 \S*layers\.1\.self_attn\.v_proj\.weight: .*" + SHARE.format("tp"),
        changes=dict(num_key_value_heads=1),
    ),
    "a sum over tp made twice": Planted(
        plants.rest_twice,
        "qwen3",
        dict(fsdp=2, tp=2),
        "G1 model.norm.weight: .*ratio 2: 2 times too large = tp.*tp does not cut",
    ),
    "a sum over fsdp made twice": Planted(
        plants.fsdp_twice, "qwen3", FSDP, r"G1 model\.norm\.weight: .*: 2 times too large = fsdp"
    ),
    "averaged over tp": Planted(
        plants.rest_averaged, "qwen3", TP, "G1 model.norm.weight: .*: 1/2 of it = 1/tp, as when it is averaged"
    ),
    "averaged over fsdp": Planted(
        plants.fsdp_averages,
        "qwen3",
        FSDP,
        r"G1 model\.norm\.weight: .*ratio 0.5: 1/2 of it = 1/fsdp, as when it is averaged",
    ),
    "experts' gradients twice": Planted(
        plants.experts_twice,
        "qwen3_moe",
        EP,
        r"G1 \S*layers\.2\.mlp\.experts\.\d\.\S*: .*: 2 times too large = ep.* that ep cuts, and",
    ),
    "heads of a gradient swapped": Planted(
        plants.heads_swapped,
        "qwen3",
        TP,
        r"G1 \S*layers\.1\.self_attn\.q_proj\.weight: .*: the right values in the wrong places",
    ),
    "a door without its sum on the way back": Planted(
        plants.enter_keeps_its_own, "qwen3", TP, r"G1 model\.norm\.weight: .*look at the way back through head"
    ),
    "experts on other ranks lose the way back": Planted(
        plants.experts_detached,
        "qwen3_moe",
        EP,
        r"G1 \S*layers\.2\.post_attention_layernorm\.weight: .*look at the way back through layers\.2\.mlp",
    ),
    "the router is detached": Planted(
        plants.router_detached,
        "qwen3_moe",
        EP,
        r"RUN .*layers\.0\.mlp\.router got no gradient, .*zeros if it is unused",
    ),
    "the router gets no gradient": Planted(
        plants.router_of_zero_gradient,
        "qwen3_moe",
        EP,
        r"G1 \S*layers\.2\.mlp\.gate\.weight: .*it is zero, nothing flows back.*the way back through layers\.2\.mlp",
    ),
    "the router trains by its aux loss alone": Planted(
        plants.router_detached,
        "qwen3_moe",
        EP,
        r"G1 \S*layers\.2\.mlp\.gate\.weight: .*: only the router's aux loss reaches it \(1 times\)",
        changes=AUX,
    ),
    "experts without a backward": Planted(
        plants.experts_without_backward, "qwen3_moe", EP, r"RUN .*layers\.0\.mlp\.experts\.gate_up got no gradient"
    ),
    "experts that never train": Planted(
        plants.experts_of_zero_gradient,
        "qwen3_moe",
        EP,
        r"G1 \S*layers\.2\.mlp\.experts\.\d\.\S*: .*it is zero, nothing flows back",
    ),
    "a tied embedding without its head": Planted(
        plants.head_keeps_its_gradient,
        "qwen3_tied",
        FSDP,
        r"G1 model\.embed_tokens\.weight: .*: it is tied, as when the embedding or the head gives",
    ),
    "each micro-batch by its own targets": Planted(
        plants.by_micro_batch,
        "qwen3",
        FSDP,
        "S1 loss: .*: each micro-batch is divided by its own targets, and then averaged",
        (r"G1 lm_head\.weight: .*: the loss is wrong already, see S1",),
    ),
    "each micro-batch by its own targets, ranks summed": Planted(
        plants.by_own_micro_batch,
        "qwen3",
        FSDP,
        "S1 loss: .*: each micro-batch is divided by its own targets, averaged on a rank",
    ),
    "each rank by its own targets": Planted(
        plants.by_own_targets, "qwen3", FSDP, "S1 loss: .*: each data rank divides by its own targets"
    ),
    "a mean of the ranks' means": Planted(
        plants.mean_of_means, "qwen3", FSDP, "S1 loss: .*: it is a mean of the data ranks' means"
    ),
    "targets counted on tp ranks too": Planted(plants.by_tp_ranks_too, "qwen3", TP, "S1 loss: .*: 1/2 of it = 1/tp"),
    "aux loss counted for each micro-batch": Planted(
        plants.aux_each_micro_batch,
        "qwen3_moe",
        FSDP,
        r"S1 loss: .*: the router's aux loss would be .*\(2 times\)",
        changes=AUX,
    ),
    "aux loss with filler": Planted(
        plants.aux_with_filler,
        "qwen3_moe",
        FSDP,
        r"S1 loss: .*: the router's aux loss would be .*with filler tokens",
        changes=AUX,
    ),
    "aux loss of each rank's own tokens": Planted(
        plants.aux_of_own_rank,
        "qwen3_moe",
        FSDP,
        r"S1 loss: .*: the router's aux loss would be .*with each rank's own tokens alone",
        changes=AUX,
    ),
    "aux loss pushes twice": Planted(
        plants.aux_pushes_twice,
        "qwen3_moe",
        FSDP,
        r"G1 \S*layers\.2\.mlp\.gate\.weight: .*: 1 times the gradient of the loss and 2 times that of the router's",
        changes=AUX,
    ),
    "forgotten doors": Planted(
        plants.no_doors,
        "qwen3",
        TP,
        r"D1 layers\.0\.mlp: .*first that is wrong: its doors enter and leave were not passed",
        (
            r"D1 document 0: .*, which is not a leak",
            r"G1 lm_head\.weight: .*: the forward is wrong from layers\.0\.mlp on, see D1",
            r"S1 loss: .*: the forward is wrong",
        ),
    ),
    "a weight that no rule cuts": Planted(
        plants.uncut, "qwen3", TP, r"D1 layers\.0\.mlp: .*: no rule cuts a weight between its doors enter and leave"
    ),
    "a cut without doors": Planted(
        plants.cut_without_doors,
        "qwen3_5_moe",
        TP,
        r"D1 layers\.0\.mlp: .*: tp cuts layers\.0\.mlp\.shared\.gate_up, but there is no door",
    ),
    "a sum of a door made twice": Planted(plants.leave_twice, "qwen3", TP, r"D1 embed: .*: 2 times too large = tp"),
    "queries meet another kv head": Planted(
        plants.another_kv_head,
        "qwen3",
        TP,
        r"D1 layers\.0\.mixer: what it gives out is the first",
        changes=dict(num_key_value_heads=4),
    ),
    "labels of another slice of the vocabulary": Planted(
        plants.labels_of_another_slice, "qwen3", TP, r"D1 head: what it gives out is the first that is wrong"
    ),
    "documents leak in attention": Planted(
        plants.leak_in_attention,
        "qwen3",
        {},
        r"D1 layers\.0\.mixer: .*: a leak from the documents before",
        (r"D1 document [1-9]: scores off by \S+ from the document alone: a leak",),
    ),
    "documents leak in the convolution": Planted(
        plants.leak_in_convolution, "qwen3_5", TP, r"D1 layers\.0\.mixer: .*: a leak from the documents before"
    ),
    "segments permuted while loading": Planted(
        plants.permuted_segment,
        "qwen3_5",
        TP,
        r"W1 layers\.0\.mixer\.qkv: .*the right values in the wrong places of \S*in_proj_qkv",
        (r"D1 layers\.0\.mixer: .*: weights are not those of the source, see W1",),
    ),
    "the gate of a query in another order": Planted(
        plants.gate_in_another_order,
        "qwen3_5",
        TP,
        r"W1 layers\.1\.mixer\.q: .*the right values in the wrong places of \S*q_proj",
        (r"D1 layers\.1\.mixer: .*: weights are not those of the source, see W1",),
    ),
    "weights paired with other experts": Planted(
        plants.scores_of_other_experts, "qwen3_moe", EP, r"D1 layers\.0\.mlp: what it gives out is the first"
    ),
    "an expert overwritten": Planted(
        plants.overwritten_expert,
        "qwen3_moe",
        EP,
        "L1 .*loading issued an? broadcast",
        (r"W1 layers\.0\.mlp\.experts\.down: .*experts\.4\.down_proj\.weight in .* on rank 1",),
    ),
    "a key is not handed out": Planted(
        plants.dropped_key, "qwen3", FSDP, r"E1 model\.norm\.weight: 1 keys of the source are not handed out"
    ),
    "rounded on the way out": Planted(
        plants.rounded_on_the_way_out, "qwen3", FSDP, r"E1 \S+: \d+ of \d+ elements differ", (r"E1 \S*q_proj",)
    ),
    "pieces that do not tile": Planted(
        plants.both_have_the_first_half, "qwen3", TP, r"T1 layers\.0\.mixer\.q: .*overlap"
    ),
    "the norm counts copies": Planted(
        plants.norm_of_copies,
        "qwen3",
        TP,
        r"N1 norm of ones: counts \S+ elements of \d+: copies are counted too",
        ("N1 norm: .*, one process finds",),
    ),
    "the norm leaves out shards": Planted(
        plants.norm_without_shards, "qwen3_5", TP, r"N1 norm of ones: .*: some shards are left out"
    ),
    "the optimizer has copies": Planted(
        plants.optimizer_over_copies,
        "qwen3",
        FSDP,
        r"U1 embed\.weight: it has a gradient on rank \d, but no update moved it",
    ),
    "half an update": Planted(
        plants.half_an_update, "qwen3", FSDP, r"U1 loss of step 1: .*the gradients were right, so the update was not"
    ),
    "replicas drift": Planted(
        plants.replicas_drift, "qwen3", TP, r"G2 \S*norm\.weight: the weight of ranks \[0, 1\] differs along tp"
    ),
    "a gather too many": Planted(
        plants.gathered_twice,
        "qwen3",
        TP,
        r"K1 all_gather: \d+ among ranks \[0, 1\] \(tp\), the bill says \d+: 10 that nobody declared",
    ),
    "a door sends in another dtype": Planted(
        plants.in_another_dtype,
        "qwen3",
        TP,
        r"D1 ",
        (r"K1 reduce_scatter: \d+ bytes among ranks \[0, 1\] \(tp\), the bill says \d+",),
    ),
    "one rank leaves a collective out": Planted(
        plants.one_rank_skips,
        "qwen3",
        TP,
        r"RUN .*rank 0 is at all_reduce of \d+ bytes at the last sums of gradients, rank 1 .* at the loss",
    ),
    "one rank does one more": Planted(
        plants.one_rank_does_more,
        "qwen3",
        FSDP,
        r"RUN .*rank 0 is at all_reduce of 16 bytes at the loss, rank 1 at all_gather of 4 bytes at",
    ),
    "another order on one rank": Planted(
        plants.other_order,
        "qwen3",
        FSDP,
        r"RUN .*rank 0 is at all_reduce of 4 bytes at a sum, rank 1 at all_gather of 4 bytes at",
    ),
}


TrialOf = Callable[[str, dict[str, int], dict[str, Any]], Trial]
Lines = Callable[[str], list[str]]  # by the name of a plant, or of what nothing is planted in


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> TrialOf:
    at, made = tmp_path_factory.mktemp("planted"), dict[str, Path]()

    def of(name: str, mesh: dict[str, int], changes: dict[str, Any]) -> Trial:
        key = f"{name} {changes}"
        if key not in made:
            made[key] = tiny.directory(at / str(len(made)), name, **changes)
        return trials.trial(made[key], mesh)

    return of


OTHERWISE = {f"{p.model} {p.mesh} {p.changes}": p for p in PLANTS.values() if p.changes}  # others: test_meshes.py
STOPPED = [name for name, bug in PLANTS.items() if bug.first.startswith("RUN")]  # ranks: each has a world of its own


def groups() -> list[list[str]]:
    """Plants of one mesh share a world. What nothing is planted in comes last: nothing may be left of them."""
    of_mesh: dict[str, list[str]] = {}
    for name, bug in (PLANTS | OTHERWISE).items():
        of_mesh.setdefault(str(bug.mesh), []).append(name)
    shared = [[name for name in group if name not in STOPPED] for group in of_mesh.values()]
    return [*shared, *([name] for name in STOPPED)]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """On each rank, for as long as the trial takes."""
    with pytest.MonkeyPatch.context() as patch:
        if name in PLANTS:
            PLANTS[name].plant(patch)
        yield


def printed(trial: TrialOf, group: Sequence[str]) -> dict[str, list[str]]:
    """The findings in the order in which they are printed."""
    bugs = {name: (PLANTS | OTHERWISE)[name] for name in group}
    tried = {name: trial(bug.model, bug.mesh, bug.changes) for name, bug in bugs.items()}
    try:
        found = trials.findings_in_turn(tried, planted)
    except RankError as error:
        if len(group) > 1:
            raise
        return {group[0]: [f"RUN {error}".replace("\n", " ")]}
    return {name: [str(f) for row in ROWS for f in of if f.oracle == row] for name, of in found.items()}


@pytest.fixture(scope="module")
def lines_of(trial: TrialOf) -> Lines:
    return worlds.Shared(groups(), functools.partial(printed, trial))


@pytest.mark.parametrize("name", PLANTS)
def test_the_cause_is_named(lines_of: Lines, name: str) -> None:
    bug, lines = PLANTS[name], lines_of(name)
    assert lines, "nothing was found"
    assert re.match(bug.first, lines[0]), "\n".join(lines[:4])
    missed = [p for p in bug.also if not any(re.match(p, line) for line in lines)]
    assert not missed, "\n".join(lines)


@pytest.mark.parametrize("name", OTHERWISE)
def test_nothing_is_found_where_nothing_is_planted(lines_of: Lines, name: str) -> None:
    assert lines_of(name) == []


def _places(tried: Trial) -> tuple[set[str], set[str]]:
    a = tried.axes
    engine = tried.engine(mw.Mesh(fsdp=a.fsdp, tp=a.tp, ep=a.ep, device="cpu"))
    batches = tried.batches(engine.model)
    with Recorder() as recorder:
        engine.step(batches)
    bill = step_bill(engine.model, len(batches[0]), len(batches))
    return {place_of(seen.at) for seen in recorder.seen if seen.at}, {place_of(c.what) for c in bill}


def test_ranks_stand_where_the_bill_says(trial: TrialOf) -> None:
    """So that a finding about the bill can name the place."""
    tried = trial("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), AUX)
    for stood, billed in worlds.run(4, _places, tried):
        assert stood <= billed, stood - billed
        assert {"the last sums of gradients", "the loss", "the norm", "the router's pooled counts"} <= stood
