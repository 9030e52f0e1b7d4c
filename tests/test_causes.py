"""Oracles detect every bug of tests/plants.py, and the first printed finding names its cause."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.engine.step_bill import step_bill
from meshwright.errors import RankError
from meshwright.verify import Recorder, Trial
from meshwright.verify.collective_checks import place_in_bill
from meshwright.verify.diagnose.causes import Suspect, cause_of, cause_of_loss
from meshwright.verify.report import ROWS
from tests import collective_plants, parts, plants, tiny, trials, worlds
from tests.plants import planted

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

    @property
    def num_steps(self) -> int:
        """Return 2 for bugs that show only in the second step."""
        return 2 if "U1 loss of step 1" in "".join(self.also) else 1

    @property
    def thorough(self) -> bool:
        return self.first[:2] in ("H1", "E2")


FSDP, TP, EP = dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2)
SHARE = r".*\bshare\b.*\bsum over {}\b(?! and)"
FLOAT32 = r".*\bfloat32 parameters"
BACK = r".*\bbackward pass through "

PLANTS = {
    "no sum over tp": Planted(
        plants.no_rest, "qwen3", TP, r"G1 model\.norm\.weight: " + SHARE.format("tp"),
        (r"G2 \S*norm\.weight: .*\bgradient\b.*\[0, 1\].*\btp\b.*\bsum over tp\b",
        r"K1 all_reduce: 2\b.*\[0, 1\].*\btp\b.*\b1 left out.*\bsums of gradients -1\b",
        r"U1 loss of step 1: .*\bgradients\b.*\bG1\b"),
    ),
    "no sum of routers over tp": Planted(
        plants.no_rest, "qwen3_moe", TP, r"G1 model\.norm\.weight: " + SHARE.format("tp"),
        (r"G1 \S*layers\.2\.mlp\.gate\.weight: " + SHARE.format("tp"),
        r"G2 layers\.2\.mlp\.router: .*\bgradient\b.*\[0, 1\].*\btp\b",
        r"G2 layers\.2\.mlp\.router: .*\bweight\b.*\[0, 1\].*\btp\b"),
    ),
    "no sum of a delta net's norm over tp": Planted(
        plants.no_rest, "qwen3_5", TP, r"G1 model\.norm\.weight: " + SHARE.format("tp"),
        (r"G1 \S*layers\.2\.linear_attn\.norm\.weight: " + SHARE.format("tp"),),
    ),
    "no sum of float32 parameters over fsdp": Planted(
        plants.no_rest, "qwen3_5", FSDP, r"G1 \S*layers\.2\.linear_attn\.\w*[^:]*: " + SHARE.format("fsdp") + FLOAT32,
    ),
    "no sum of float32 parameters over fsdp and tp": Planted(
        plants.no_rest, "qwen3_5", dict(fsdp=2, tp=2), r"G1 model\.norm\.weight: " + SHARE.format("tp"),
        (r"G1 \S*layers\.0\.linear_attn\.norm\.weight: " + SHARE.format("fsdp and tp"),
        r"G1 \S*layers\.0\.linear_attn\.A_log: " + SHARE.format("fsdp")),
    ),
    "no sum over fsdp": Planted(
        plants.own_share_of_fsdp, "qwen3", FSDP, r"G1 model\.norm\.weight: .*\bsum over fsdp\b",
    ),
    "no sum of float32 parameters over replicas": Planted(
        plants.float32_left_to_fsdp, "qwen3_5", dict(replicate=2),
        r"G1 \S*layers\.2\.linear_attn\.norm\.weight: " + SHARE.format("replicate") + FLOAT32,
        (r"K1 all_reduce: \d+\b.*\[0, 1\].*\b1 left out.*\bsums of gradients -1\b",),
    ),
    "no sum over replicas": Planted(
        plants.replicas_never, "qwen3", dict(replicate=2), r"G1 model\.norm\.weight: " + SHARE.format("replicate"),
    ),
    "no sum over replicas is asked for": Planted(
        plants.replicas_never_asked, "qwen3", dict(replicate=2),
        r"RUN .*\bgradient\b.*\b(\d+) of \1 parameters.*\bfsdp\b.*\breplicate\b",
    ),
    "no sum of kv copies": Planted(
        plants.rest_without_matrices, "qwen3", TP, r"G1 \S*layers\.1\.self_attn\.v_proj\.weight: " + SHARE.format("tp"),
        changes=dict(num_key_value_heads=1),
    ),
    "a sum over tp made twice": Planted(
        plants.rest_twice, "qwen3", dict(fsdp=2, tp=2),
        r"G1 model\.norm\.weight: .*\bratio 2\b.*\b2 times.*= tp\b.*\btp does not cut",
    ),
    "a sum over fsdp made twice": Planted(
        plants.fsdp_twice, "qwen3", FSDP, r"G1 model\.norm\.weight: .*\b2 times.*= fsdp\b",
    ),
    "averaged over tp": Planted(
        plants.rest_averaged, "qwen3", TP, r"G1 model\.norm\.weight: .*\b1/2 of it = 1/tp\b.*\baverage",
    ),
    "averaged over fsdp": Planted(
        plants.fsdp_averages, "qwen3", FSDP,
        r"G1 model\.norm\.weight: .*\bratio 0\.5\b.*\b1/2 of it = 1/fsdp\b.*\baverage",
    ),
    "experts' gradients twice": Planted(
        plants.experts_twice, "qwen3_moe", EP,
        r"G1 \S*layers\.2\.mlp\.experts\.\d\.\S*: .*\b2 times.*= ep\b.*\bep cuts",
    ),
    "heads of a gradient swapped": Planted(
        plants.heads_swapped, "qwen3", TP,
        r"G1 \S*layers\.1\.self_attn\.q_proj\.weight: .*\bright values\b.*\bwrong places",
    ),
    "a door without its sum on the way back": Planted(
        plants.enter_keeps_its_own, "qwen3", TP, r"G1 model\.norm\.weight: " + BACK + "head",
    ),
    "experts on other ranks lose the way back": Planted(
        plants.experts_detached, "qwen3_moe", EP,
        r"G1 \S*layers\.2\.post_attention_layernorm\.weight: " + BACK + r"layers\.2\.mlp",
    ),
    "the router is detached": Planted(
        plants.router_detached, "qwen3_moe", EP, r"RUN .*layers\.0\.mlp\.router\b.*\bgradient\b.*\bzeros\b",
    ),
    "the router gets no gradient": Planted(
        plants.router_of_zero_gradient, "qwen3_moe", EP,
        r"G1 \S*layers\.2\.mlp\.gate\.weight: .*\bzero\b" + BACK + r"layers\.2\.mlp",
    ),
    "the router trains by its aux loss alone": Planted(
        plants.router_detached, "qwen3_moe", EP,
        r"G1 \S*layers\.2\.mlp\.gate\.weight: .*\bonly\b.*\baux loss\b.*\b1 times", changes=AUX,
    ),
    "experts without a backward": Planted(
        plants.experts_without_backward, "qwen3_moe", EP, r"RUN .*layers\.0\.mlp\.experts\.gate_up\b.*\bgradient\b",
    ),
    "experts that never train": Planted(
        plants.experts_of_zero_gradient, "qwen3_moe", EP, r"G1 \S*layers\.2\.mlp\.experts\.\d\.\S*: .*\bzero\b",
    ),
    "a tied embedding without its head": Planted(
        plants.head_keeps_its_gradient, "qwen3_tied", FSDP,
        r"G1 model\.embed_tokens\.weight: .*\btied\b.*\bembedding\b.*\bhead\b",
    ),
    "aux loss counted for each micro-batch": Planted(
        plants.aux_each_micro_batch, "qwen3_moe", FSDP, r"S1 loss: .*\baux loss\b.*\b2 times\b", changes=AUX,
    ),
    "aux loss with filler": Planted(
        plants.aux_with_filler, "qwen3_moe", FSDP, r"S1 loss: .*\baux loss\b.*\bpadding\b", changes=AUX,
    ),
    "aux loss of each rank's own tokens": Planted(
        plants.aux_of_own_rank, "qwen3_moe", FSDP, r"S1 loss: .*\baux loss\b.*\brank's own tokens\b", changes=AUX,
    ),
    "each micro-batch by its own targets": Planted(
        plants.by_micro_batch, "qwen3", FSDP,
        r"S1 loss: .*\bmicro-batch\b.*\bown targets\b.*\baverage(?!.* on a rank\b)",
        (r"G1 lm_head\.weight: .*\bloss\b.*\bS1\b",),
    ),
    "each micro-batch by its own targets, ranks summed": Planted(
        plants.by_own_micro_batch, "qwen3", FSDP, r"S1 loss: .*\bmicro-batch\b.*\bown targets\b.*\baverage.*\brank\b",
    ),
    "each rank by its own targets": Planted(
        plants.by_own_targets, "qwen3", FSDP, r"S1 loss: (?!.*\bmicro-batch\b).*\bdata rank\b.*\bown targets\b",
    ),
    "a mean of the ranks' means": Planted(
        plants.mean_of_means, "qwen3", FSDP, r"S1 loss: .*\bmean\b.*\bdata ranks\b.*\bmeans\b",
    ),
    "weights of tokens are ignored": Planted(plants.weights_ignored, "qwen3", FSDP, r"S1 loss: "),
    "targets counted on tp ranks too": Planted(plants.by_tp_ranks_too, "qwen3", TP, r"S1 loss: .*\b1/2 of it = 1/tp\b"),
    "aux loss pushes twice": Planted(
        plants.aux_pushes_twice, "qwen3_moe", FSDP,
        r"G1 \S*layers\.2\.mlp\.gate\.weight: .*\b1 times\b.*\bloss\b.*\b2 times\b.*\brouter\b", changes=AUX,
    ),
    "forgotten doors": Planted(
        plants.no_doors, "qwen3", TP, r"D1 layers\.0\.mlp: (?!.*\brule).*\bfirst\b.*\bdoors enter and leave\b",
        (r"D1 document 0 of batch 0: .*\bnot a leak\b",
        r"G1 lm_head\.weight: .*\bforward\b.*\blayers\.0\.mlp\b.*\bD1\b", r"S1 loss: .*\bforward\b.*\bD1\b"),
    ),
    "a weight that no rule cuts": Planted(
        plants.uncut, "qwen3", TP, r"D1 layers\.0\.mlp: .*\bno rule\b.*\bdoors enter and leave\b",
    ),
    "a cut without doors": Planted(
        plants.cut_without_doors, "qwen3_5_moe", TP,
        r"D1 layers\.0\.mlp: .*\btp cuts layers\.0\.mlp\.shared\.gate_up\b.*\bno door\b",
    ),
    "a sum of a door made twice": Planted(plants.leave_twice, "qwen3", TP, r"D1 embed: .*\b2 times.*= tp\b"),
    "queries meet another kv head": Planted(
        plants.another_kv_head, "qwen3", TP, r"D1 layers\.0\.mixer: (?!.*\b(leak|doors?|W1)\b).*\bfirst\b",
        changes=dict(num_key_value_heads=4),
    ),
    "labels of another slice of the vocabulary": Planted(
        plants.labels_of_another_slice, "qwen3", TP, r"D1 head: (?!.*\b(leak|doors?|W1)\b).*\bfirst\b",
    ),
    "documents leak in attention": Planted(
        plants.leak_in_attention, "qwen3", {}, r"D1 layers\.0\.mixer: .*(?<!not )\ba leak\b",
        (r"D1 document [1-9] of batch 0: .*\b\d\S*e\S\d+ .*(?<!not )\ba leak\b",),
    ),
    "documents leak in the convolution": Planted(
        plants.leak_in_convolution, "qwen3_5", TP, r"D1 layers\.0\.mixer: .*(?<!not )\ba leak\b",
    ),
    "segments permuted while loading": Planted(
        plants.permuted_segment, "qwen3_5", TP,
        r"W1 layers\.0\.mixer\.qkv\.weight: .*\bright values\b.*\bwrong places\b.* \S*in_proj_qkv",
        (r"D1 layers\.0\.mixer: .*\bweights\b.*\bW1\b",),
    ),
    "the gate of a query in another order": Planted(
        plants.gate_in_another_order, "qwen3_5", TP,
        r"W1 layers\.1\.mixer\.q\.weight: .*\bright values\b.*\bwrong places\b.* \S*q_proj",
        (r"D1 layers\.1\.mixer: .*\bweights\b.*\bW1\b",),
    ),
    "weights paired with other experts": Planted(
        plants.scores_of_other_experts, "qwen3_moe", EP, r"D1 layers\.0\.mlp: (?!.*\b(leak|doors?|W1)\b).*\bfirst\b",
    ),
    "an expert overwritten": Planted(
        plants.overwritten_expert, "qwen3_moe", EP, r"L1 .*\bload\w* .*\bbroadcast\b",
        (r"W1 layers\.0\.mlp\.experts\.down: .*experts\.4\.down_proj\.weight\b.*\brank 1\b",),
    ),
    "a key is not handed out": Planted(plants.dropped_key, "qwen3", FSDP, r"E1 model\.norm\.weight: .*\b1 keys?\b"),
    "rounded on the way out": Planted(
        plants.rounded_on_the_way_out, "qwen3", FSDP, r"E1 \S+: \d+ of \d+ elements\b", (r"E1 \S*q_proj",),
    ),
    "float32 rounded by an export": Planted(
        plants.float32_rounded_by_exports, "qwen3_5", FSDP,
        r"E2 \S*A_log: export\(dtype=torch\.bfloat16\) .*\bbfloat16, not in torch\.float32\b.*\bnever rounded\b",
    ),
    "entropy of a slice": Planted(
        plants.entropy_of_a_slice, "qwen3", TP,
        r"H1 loss with entropy: .*\bone process\b.*\bslices of the vocabulary\b",
    ),
    "a head without some tokens": Planted(
        plants.head_without_some_tokens, "qwen3", FSDP,
        r"G1 lm_head\.weight: (?!.*\bmissing\b).*\bchunks of ops/loss\.py\b",
    ),
    "pieces that do not tile": Planted(
        plants.both_have_the_first_half, "qwen3", TP, r"T1 layers\.0\.mixer\.q\.weight: .*overlap",
    ),
    "the norm leaves out shards": Planted(plants.norm_without_shards, "qwen3_5", TP, r"N1 norm of ones: .*\bshards\b"),
    "the norm counts copies": Planted(
        plants.norm_of_copies, "qwen3", TP, r"N1 norm of ones: .*\b\d+\.\d+ elements of \d+\b.*\bcopies\b",
        (r"N1 norm: \d\S*\d\b.*\bone process\b.*\d\.\d",),
    ),
    "the optimizer has copies": Planted(
        plants.optimizer_over_copies, "qwen3", FSDP,
        r"U1 embed\.weight: .*\bgradient\b.*\brank \d\b.*\bupdate\b.*\bcopy\b",
    ),
    "half an update": Planted(
        plants.half_an_update, "qwen3", FSDP,
        r"U1 \S*: \d+ of \d+\b.*\bafter step 0\b(?!.*\bG1\b).*\bgradients\b.*\bright\b.*\bupdate\b",
    ),
    "replicas drift": Planted(
        plants.replicas_drift, "qwen3", TP, r"G2 \S*norm\.weight: .*\bweight\b.*\[0, 1\].*\btp\b",
    ),
    "one rank leaves a collective out": Planted(
        collective_plants.one_rank_skips, "qwen3", TP,
        r"RUN .*\brank 0\b.*\ball_reduce of \d+ bytes\b.*\bsums of gradients\b.*\brank 1\b.*\bthe loss\b",
    ),
    "a gather too many": Planted(
        collective_plants.gathered_twice, "qwen3", TP,
        r"K1 all_gather: \d+\b.*\[0, 1\].*\btp\b.*\bbill\b.*\b\d+\b.*\b10\b.*\bdeclare",
    ),
    "a door sends in another dtype": Planted(
        collective_plants.in_another_dtype, "qwen3", TP, r"D1 ",
        (r"K1 reduce_scatter: \d+ bytes\b.*\[0, 1\].*\btp\b.*\bbill\b.*\b\d+\b",),
    ),
    "one rank does one more": Planted(
        collective_plants.one_rank_does_more, "qwen3", FSDP,
        r"RUN .*\brank 0\b.*\ball_reduce of 24 bytes\b.*\bthe loss\b.*\brank 1\b.*\ball_gather of 4 bytes\b",
    ),
    "another order on one rank": Planted(
        collective_plants.other_order, "qwen3", FSDP,
        r"RUN .*\brank 0\b.*\ball_reduce of 4 bytes\b.*\brank 1\b.*\ball_gather of 4 bytes\b",
    ),
}  # fmt: skip


TrialOf = Callable[[str, dict[str, int], dict[str, Any]], Trial]
Lines = Callable[[str], list[str]]  # by the name of a plant, or of a trial without one


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> TrialOf:
    at, made = tmp_path_factory.mktemp("planted"), dict[str, Path]()

    def of(name: str, mesh: dict[str, int], changes: dict[str, Any]) -> Trial:
        key = f"{name} {changes}"
        if key not in made:
            made[key] = tiny.directory(at / str(len(made)), name, **changes)
        return trials.trial(made[key], mesh)

    return of


def one_of_each() -> Iterator[str]:
    """Yield plants so that each oracle and each axis comes once: what `make test` runs."""
    seen = set[str]()
    for name, bug in reversed(PLANTS.items()):
        traits = {bug.first.partition(" ")[0], *bug.mesh}
        if not traits <= seen:
            yield name
        seen |= traits


TRIED = PLANTS if parts.ALL else {name: PLANTS[name] for name in one_of_each()}
OTHERWISE = {f"{p.model} {p.mesh} {p.changes}": p for p in TRIED.values() if p.changes}  # others: test_meshes.py
STOPPED = [name for name, bug in TRIED.items() if bug.first.startswith("RUN")]  # these end their world


def printed(trial: TrialOf, group: Sequence[str]) -> dict[str, list[str]]:
    """Return the findings in the order in which verify prints them."""
    bugs = {name: (PLANTS | OTHERWISE)[name] for name in group}
    tried = {
        n: replace(trial(b.model, b.mesh, b.changes), steps=b.num_steps, thorough=b.thorough) for n, b in bugs.items()
    }
    try:
        findings = trials.findings_in_turn(tried, lambda name: planted(PLANTS[name].plant if name in PLANTS else None))
    except RankError as error:
        if len(group) > 1:
            raise
        return {group[0]: [f"RUN {error}".replace("\n", " ")]}
    return {name: [str(f) for row in ROWS for f in of if f.oracle == row] for name, of in findings.items()}


@pytest.fixture(scope="module")
def lines_of(trial: TrialOf) -> Lines:
    # Trials without a plant come last in a world, so that they detect leftovers.
    keys = {name: name if name in STOPPED else bug.mesh for name, bug in (TRIED | OTHERWISE).items()}
    return worlds.shared(keys, functools.partial(printed, trial))


@pytest.mark.parametrize("name", TRIED)
def test_first_finding_names_the_cause(lines_of: Lines, name: str) -> None:
    bug, lines = PLANTS[name], lines_of(name)
    assert lines, "no findings"
    assert re.match(bug.first, lines[0]), "\n".join(lines[:4])
    missed = [p for p in bug.also if not any(re.match(p, line) for line in lines)]
    assert not missed, "\n".join(lines)


def test_no_findings_without_a_plant(lines_of: Lines) -> None:
    assert {name: lines_of(name) for name in OTHERWISE} == {name: [] for name in OTHERWISE}


def _places(tried: Trial) -> tuple[set[str], set[str]]:
    a = tried.axes
    engine = tried.engine(mw.Mesh(fsdp=a.fsdp, tp=a.tp, ep=a.ep, device="cpu"))
    batches = tried.batches(engine.model, 0)
    with Recorder() as recorder:
        engine.step(batches)
    bill = step_bill(engine.model, len(batches[0]), len(batches))
    return {place_in_bill(each.at) for each in recorder.collectives if each.at}, {place_in_bill(c.what) for c in bill}


def test_recorded_places_are_on_the_bill(trial: TrialOf) -> None:
    """A finding about the bill names the place."""
    tried = trial("qwen3_5_moe", dict(tp=2, ep=2), AUX)
    for recorded, billed in worlds.run(2, _places, tried):
        assert recorded <= billed, recorded - billed
        assert {"the last sums of gradients", "the loss", "the norm", "the router's pooled counts"} <= recorded


def test_only_existing_sums_can_be_missing() -> None:
    """tp cuts the head, so its gradient is not summed over tp."""
    g = torch.Generator().manual_seed(0)
    wrong, expected = torch.randn(2, 64, generator=g)
    of = functools.partial(Suspect, wrong, expected, Axes(fsdp=2, tp=2), ["tp"])
    assert "a sum over tp is missing" in cause_of(of())[1]
    assert "missing" not in cause_of(of(sharded=("fsdp",)))[1]
    assert "missing" not in cause_of(of(last=True))[1]
    assert "chunks of ops/loss.py" in cause_of(of(last=True))[1]


def test_bugs_that_keep_the_loss_are_no_cause() -> None:
    """The targets of one data rank are all targets."""
    cause = cause_of_loss(2.0 + 0.3, 2.0 + 0.1, 0.1, [[(4.0, 2.0), (4.0, 2.0)]], 4.0, Axes(tp=2))
    assert "own targets" not in cause
    assert "padding" in cause
