"""Check what a plan says of a mesh that does not fit, and how a search bounds, costs and lists meshes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.optim import AdamW, Muon
from meshwright.plan import fit_advice, search, terminal, wording
from meshwright.plan.devices import peak_of
from meshwright.plan.figures import Figures, RankMemory, work_of
from meshwright.plan.requested import optimizer_of
from meshwright.plan.search import Candidate, Cut, Search, SearchRequest, Size, Variant
from meshwright.plan.step_time import INSIDE, Estimate, Wait
from meshwright.recipe import RECOMPUTE, MemoryOptions, Pipeline, Recipe
from meshwright.sharding import Stored
from tests import tiny
from tests.plan_figures import GB, H100, fake, figures_of


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 70), ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362), ("NVIDIA L40", 181), ("NVIDIA L4", 121), ("NVIDIA B200", 2250), ("NVIDIA H800", 989),
        ("AMD Instinct MI300X", 1307), ("AMD Instinct MI250X / MI250", 383), ("NVIDIA GH200 480GB", 989), ("cpu", None),
        ("NVIDIA RTX A1000 6GB", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_device_by_its_name(device: str, peak: int | None) -> None:
    assert peak_of(device) == (None if peak is None else peak * 10**12)


def test_another_mesh_does_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much recomputation or more, and the optimizer of the plan. Stages are cut anew."""
    asked: list[Any] = []

    class Searched:
        def __init__(self, blueprint: Any, request: SearchRequest, say: Any) -> None:
            asked.append((blueprint, request))

        def quickest(self, until: float) -> list[Any]:
            return [until]

    monkeypatch.setattr(fit_advice, "Search", Searched)
    pipeline, memory = Pipeline(ends=(1, 2), hold=True), MemoryOptions("selective")
    config = Blueprint.of(tiny.of("qwen3"), None, Recipe(pipeline=pipeline, memory=memory))
    axes, optimizer = Axes(pp=2, fsdp=3, tp=2), AdamW(state_dtype=torch.bfloat16)
    figures = Figures("m", config, axes, work_of(axes, 64, 5), 7 * GB, optimizer, H100)
    assert cast(Any, fit_advice._search(figures)) == [fit_advice._SEARCH_SECONDS]
    [(blueprint, request)] = asked
    assert request.size == Size(12, 4, 64, 64 * 5 * 3)
    assert (request.device, request.recompute, request.optimizer, request.top) == (7 * GB, RECOMPUTE[1:], optimizer, 1)
    assert (blueprint.recipe.pipeline, blueprint.recipe.memory) == (Pipeline(), memory)


@pytest.mark.parametrize(
    ("mesh", "of_search", "advised"),
    [
        (dict(fsdp=2), [Axes(tp=2)], ["--mesh tp=2 --micro-batches 5 (the same 2 ranks)"]),
        (dict(fsdp=2), [Axes(fsdp=2)], []),  # with other options, which are advised anyway
        (dict(fsdp=2), [], []),
        ({}, [Axes(tp=2)], []),
    ],
)
def test_another_mesh_is_another(
    mesh: dict[str, int], of_search: list[Axes], advised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [Candidate(fake(axes=axes, work=fake(num_batches=5), memory=MemoryOptions())) for axes in of_search]
    monkeypatch.setattr(fit_advice, "_search", lambda _: made)
    figures = fake(axes=Axes(**mesh), passing=1, cluster=1)
    assert fit_advice._other_meshes(figures) == advised
    assert fit_advice._other_meshes(fake(axes=Axes(fsdp=2), passing=None, cluster=1)) == []
    assert fit_advice._other_meshes(fake(axes=Axes(fsdp=2), passing=1, cluster=None)) == []


@pytest.mark.parametrize(("device", "way"), [(None, None), (2000, None), (1999, "choose more")])
def test_a_plan_that_fits_has_no_way_out(device: int | None, way: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figures, "need", fake(stored=lambda rank: [Stored("parameters", 2000)]))
    for module in (terminal, fit_advice):
        monkeypatch.setattr(module, "advice", lambda _: "choose more")
    assert terminal.plan_json(figures_of("qwen3", device=device), {})["way_out"] == way


def test_options_help_only_if_they_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest change of each kind."""
    tokens, state = [("a", False), ("b", True), ("c", True)], [("d", False)]
    of = lambda kind: lambda _: ((option, fake(fits=fits)) for option, fits in kind)  # noqa: E731 - short
    monkeypatch.setattr(fit_advice, "_fewer_tokens", of(tokens))
    monkeypatch.setattr(fit_advice, "_narrower_state", of(state))
    assert fit_advice.helps(fake()) == ["b"]
    nearest = fake(figures=fake(choices=["e"]))
    assert terminal.remedy(nearest) == "choose b or e"
    nearest.figures.choices = tokens[:] = state[:] = []
    assert terminal.remedy(nearest) == "choose more ranks, larger devices, or fewer --tokens"


@pytest.mark.parametrize(
    ("device", "text", "more"),
    [
        (None, "6.000 GB per rank and 3.000 GB on the host", "NOT"),
        (8 * GB, "fits 8 GB", "6.000 GB and 3.000 GB on the host, and 2.000 GB remain free on the device. NOT"),
        (5 * GB, "does not fit 5 GB", "6.000 GB on the device, which is 1.000 GB too much. To fit, choose x."),
    ],
)
def test_a_verdict_is_about_the_device(
    device: int | None, text: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on the host do not count for it."""
    monkeypatch.setattr(fit_advice, "advice", lambda _: "choose x")
    monkeypatch.setattr(fit_advice, "not_counted", lambda _: "NOT")
    figures = fake(most=candidate().figures.most, device=device, fits=device is not None and device > 6 * GB)
    made = fit_advice.verdict(figures)
    assert (made.text, made.more.removeprefix("A rank stores ")) == (text, more)
    assert made.ok == (None if device is None else figures.fits)


@pytest.mark.parametrize(("state", "narrower"), [(None, ["bfloat16", "uint8"]), (torch.bfloat16, ["uint8"]),
                                                 (torch.uint8, [])])  # fmt: skip
def test_only_narrower_state_is_suggested(state: torch.dtype | None, narrower: list[str]) -> None:
    config, axes = tiny.of("qwen3", hidden_size=512, intermediate_size=1024), Axes()
    optimizer = AdamW(state_dtype=state)
    figures = Figures("a model", Blueprint.of(config), axes, work_of(axes, 64, 1), 10**6, optimizer)
    suggested = [option for option, _ in fit_advice._narrower_state(figures)]
    assert suggested == [f"--state-dtype {each}" for each in narrower]


@pytest.mark.parametrize("tower", [None, "tower"])
def test_what_a_plan_leaves_out_is_said(tower: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "communicators", lambda _: fake(count=0, num_bytes=0))
    said = wording.not_counted(fake(blueprint=fake(module=fake(tower=tower))))
    assert ("vision encoder" in said) == (tower is not None)
    assert "NCCL" not in said


@pytest.mark.parametrize(
    ("kind", "state", "expected"),
    [("adamw", None, AdamW()), ("muon", "bfloat16", Muon(state_dtype=torch.bfloat16)), ("muon", None, Muon()),
     ("adamw", "uint8", AdamW(state_dtype=torch.uint8))],
)  # fmt: skip
def test_the_optimizer_of_the_options(kind: str, state: str | None, expected: Any) -> None:
    assert optimizer_of({"optimizer": kind, "state_dtype": state}) == expected


def candidate(**more: Any) -> Any:
    times = Estimate(5.0, (Wait("w", INSIDE, 1.0),), 8.0, 7.0, 0.5)  # 1 is launching, and 2 are not hidden
    stored = (Stored("parameters", 6 * GB), Stored("moments", 3 * GB, host=True))
    figures = fake(most=RankMemory(0, stored), **more)
    return fake(estimate=times, figures=figures, left_bytes=GB, chosen_hold=None)


def test_columns_of_a_search() -> None:
    grid = terminal._table(fake(best=[candidate()]))
    cells = {str(column.header): [*column.cells] for column in grid.columns}
    parts = {"matmuls": 5, "waits": 1, "host": 1, "FSDP": 2, "bubble": 7}
    assert {name: cells[name] for name in parts} == {name: [f"{n / 16:.0%}"] for name, n in parts.items()}
    assert (cells["a step"], cells["stored"], cells["free"]) == (["16.0 s"], ["6.000 GB"], ["1.000 GB"])


def test_a_candidate_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds what is not on the host."""
    for name in ("why", "command", "times_as_json", "tokens_a_second"):
        monkeypatch.setattr(terminal, name, lambda *_, name=name: name)
    memory, recipe = MemoryOptions(offload=True), Recipe(pipeline=Pipeline("v"))
    for axes in (Axes(fsdp=2), Axes(pp=2)):
        one = candidate(axes=axes, memory=memory, blueprint=fake(recipe=recipe), work=fake(num_batches=5))
        made = terminal._candidate_as_json(one, one, fake())
        assert (made["device_bytes"], made["left_bytes"], made["num_batches"]) == (6 * GB, GB, 5)
        assert made["bytes"] == {"parameters": 6 * GB, "moments on the host": 3 * GB}
        assert (made["pipeline"] or {}).get("schedule") == ("v" if axes.pp > 1 else None)
        assert made["savings"]["offload"] is True


def test_a_quick_estimate_has_the_options_of_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doors of the reduced model are marked for each variant, and a pipeline that holds gathers once."""
    calls: list[Any] = []
    monkeypatch.setattr(search, "mark", lambda module, memory: calls.append((module, memory)))
    monkeypatch.setattr(search, "quick_estimate", lambda *given: calls.append(given) or fake(seconds=3.0))
    model = fake(blueprint=fake(module="doors"))
    searching = fake(model=model, request=fake(cluster="c"), _work=lambda cut: cut.num_batches)
    full, once = MemoryOptions("full", offload=True), MemoryOptions("full", gather_once=True, sum_once=True)
    for axes, hold, memory in ((Axes(), None, full), (Axes(pp=2), False, full), (Axes(pp=2), True, once)):
        calls.clear()
        made = Search._estimated(searching, 4, Cut(axes, 5), Variant(full, hold), 0)
        assert (made.seconds, made.number) == (3.0, 4)
        assert calls == [("doors", full), (model, axes, 5, memory, "c")]


@pytest.mark.parametrize(
    ("pp", "hold", "holds"), [(1, None, False), (2, True, True), (2, None, True), (2, False, False)]
)
def test_the_bound_of_a_variant_holds_what_it_holds(pp: int, hold: bool | None, holds: bool) -> None:
    asked: list[Any] = []
    note = lambda *given, **more: asked.append((*given, more)) or 5.0  # noqa: E731 - short
    memory, cut = MemoryOptions("full"), Cut(Axes(pp=pp), 4)
    assert Search._least(fake(least=fake(num_bytes=note)), cut, Variant(memory, hold)) == 5
    assert asked == [(cut.axes, 4, memory, {"holds": holds})]


@pytest.mark.parametrize(("optimizer", "state_bytes"), [(AdamW(), 8), (AdamW(state_dtype=torch.bfloat16), 4)])
def test_a_search_bounds_the_state_of_its_optimizer(optimizer: Any, state_bytes: int) -> None:
    """Two moments of an element, of float32 masters by default."""
    request = SearchRequest("m", Size(2, 8, 64, 256), "x", GB, H100, optimizer=optimizer)
    assert Search(Blueprint.of(tiny.of("qwen3")), request, print).least.state_bytes == state_bytes


def test_a_variant_is_costed_in_full_once() -> None:
    """With its own options, and the optimizer of the request. `hold` is a choice only where the user made none."""
    optimizer, memory = AdamW(state_dtype=torch.bfloat16), MemoryOptions("full")
    size = Size(2, 8, 64, 256)
    for of_user in (None, True):
        blueprint = Blueprint.of(tiny.of("qwen3"), None, Recipe(pipeline=Pipeline(hold=of_user)))
        request = SearchRequest("m", size, "x", 7 * GB, H100, optimizer=optimizer)
        searching = fake(request=request, blueprint=blueprint, in_full={})
        searching._work = lambda cut: work_of(cut.axes, 64, cut.num_batches)
        cut = Cut(Axes(pp=2), 4)
        made = {hold: Search._in_full(searching, cut, Variant(memory, hold)) for hold in (True, False)}
        assert Search._in_full(searching, cut, Variant(memory, True)) is made[True]
        for hold, each in made.items():
            figures, recipe = each.figures, each.figures.blueprint.recipe
            assert (recipe.pipeline.hold, recipe.memory, figures.optimizer) == (hold, memory, optimizer)
            assert (figures.work.tokens, figures.work.num_batches, figures.device) == (64, 4, 7 * GB)
            assert (figures.cluster, each.chosen_hold) == (H100, hold if of_user is None else None)


def test_a_search_without_a_result_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("remedy", "assumptions", "not_counted"):
        monkeypatch.setattr(terminal, name, lambda *_, name=name: name)
    monkeypatch.setattr(terminal, "_candidate_as_json", lambda each, first, request: (each, first))
    one, two = candidate(), candidate()
    size = fake(num_ranks=8, tokens=64, global_tokens=256)
    request = fake(model="m", device=GB, size=size)
    counts: Any = dict(num_meshes=9, num_too_large=4, num_in_full=3)
    best = terminal.search_as_json(fake(best=(one, two), nearest=None, **counts), request, {})
    none = terminal.search_as_json(fake(best=(), nearest=two, **counts), request, {"date": "today"})
    assert (best["best"], best["nearest"], best["way_out"]) == ([(one, one), (two, one)], None, None)
    assert (none["best"], none["nearest"], none["way_out"], none["date"]) == ([], (two, two), "remedy", "today")
    assert (best["ranks"], best["tokens"], best["global_tokens"], best["num_too_large"]) == (8, 64, 256, 4)


@pytest.mark.parametrize(("once", "sizes"), [(False, [1, 2, 4, 6]), (True, [1, 2, 4, 6]), (4, [1, 2, 4]), (3, [1, 6])])
def test_nodes_of_token_once_divide_ep(once: bool | int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Cut(Axes(fsdp=12, ep=ep), 1) for ep in (1, 2, 4, 6)]
    monkeypatch.setattr(search, "cuts", lambda *_: made)
    recipe = Recipe(memory=MemoryOptions(token_once=once))
    searching = fake(blueprint=fake(recipe=recipe), request=fake(size=None, optimizer=None))
    assert [cut.axes.ep for cut in cast(Any, Search._meshes).func(searching)] == sizes


@pytest.mark.parametrize(
    ("memory", "tried"), [(MemoryOptions(), True), (MemoryOptions(offload=True), False),
                          (MemoryOptions(gather_once=True), False), (MemoryOptions(sum_once=True), False)],
)  # fmt: skip
def test_offload_is_tried_where_it_may_be(memory: MemoryOptions, tried: bool) -> None:
    costed: list[Any] = []
    searching = fake(
        blueprint=fake(recipe=Recipe(memory=memory)), _meshes=["a", "b"], quickest=lambda until: [],
        _may_fit=lambda meshes, memory: meshes[:1] if not memory.offload else meshes, _fastest=list,
        _cost_fastest=lambda *given: costed.append(given), _nearest=lambda _: fake(figures=fake(fits=False)),
        in_full={1: 1}, _once=memory.gather_once or memory.sum_once,
    )  # fmt: skip
    result = Search.run(searching)
    assert costed == [(["a", "b"], MemoryOptions(offload=True), search._STOP_OFFLOADED)] * tried
    assert (result.best, result.num_meshes, result.num_in_full) == ((), 2, 1)
    assert result.num_too_large == (0 if memory.offload else 1)
    searching._nearest = lambda _: fake(figures=fake(fits=True))
    assert [len(Search.run(searching).best), Search.run(searching).nearest] == [1, None]
