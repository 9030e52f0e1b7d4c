"""Moments of AdamW in 8 bits: a code that says as much of small numbers as of large ones, rounded without bias, and the
same bits on every mesh, in memory and in checkpoints."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.optim import AdamW, LocalOptimizer, Place, local
from meshwright.optim.int8_state import BLOCK, CODES, FIRST, SECOND, Code, decode, dice, encode, levels
from meshwright.sharding import Piece, pieces
from tests import parts, tiny, trials, worlds
from tests.test_checkpoint import bytes_of, same, state_of, world_of
from tests.test_checkpoint_broken import error_of
from tests.words import words

CPU = torch.device("cpu")
# The last block of a row of 304 columns has 48. Between 512 columns tp=2 cuts where a block ends, and tp=4 does not.
SIZES: dict[str, Any] = dict(
    hidden_size=304, intermediate_size=512, head_dim=128, num_attention_heads=4, num_hidden_layers=2
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_tied": SIZES,
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 272, "mlp_only_layers": [1], "num_experts": 4},
    "qwen3_5_moe": {**tiny.in_blocks("qwen3_5_moe"), "hidden_size": 304, "shared_expert_intermediate_size": 512,
        "moe_intermediate_size": 256, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
Whole = dict[str, list[Tensor]]


def directory(at: Path, name: str) -> Path:
    return tiny.directory(at, name, dtype=torch.bfloat16, **FAMILIES[name])


def engine_of(source: Path, mesh: Mapping[str, int], state: torch.dtype | None = torch.uint8) -> mw.Engine:
    model = mw.load(source, mw.Mesh(**mesh), dtype=torch.float32)
    return mw.Engine(model, lr=lambda step: 1e-3 * (step + 1), optimizer=AdamW(state_dtype=state))


def train(engine: mw.Engine, num: int) -> list[float]:
    return [engine.step(tiny.batches(100 * engine.steps)[:1]).loss for _ in range(num)]


def some(num_rows: int, num_cols: int, code: Code = FIRST, seed: int = 0) -> Tensor:
    """Numbers of many sizes."""
    g = torch.Generator().manual_seed(seed)
    result = torch.randn(num_rows, num_cols, generator=g) * 10 ** torch.randn(num_rows, num_cols, generator=g)
    return result if code.signed else result.square()


@pytest.mark.parametrize("code", CODES, ids=["first", "second"])
def test_every_code_comes_back(code: Code) -> None:
    """The dice do not matter, nor a short last block. Scales are powers of 2, so that a level is itself again."""
    every_RC = torch.arange(256).repeat(3, 2)[:, :300].to(torch.uint8)
    every_RC[:, 128] = code.num if code.signed else 128  # 128 would be minus zero, which is never written
    every_RC[:, 256] = code.num
    scales_RB = torch.tensor([[1.0, 2.0**-30], [2.0**20, 0.5], [4.0, 2.0**-60]])
    wide_RC = decode(every_RC, scales_RB, code)
    for at in (0.0, 0.3, 0.999):
        result_RC, scales = encode(wide_RC, code, torch.full((3, 512), at))
        assert torch.equal(result_RC, every_RC)
        assert torch.equal(scales, scales_RB)


@pytest.mark.parametrize("code", CODES, ids=["first", "second"])
def test_the_error_is_as_large_as_a_step_of_the_levels(code: Code) -> None:
    """The largest of a block, zero, and the mean have no error."""
    wide_RC = some(500, 300, code)
    wide_RC[:7] = 0
    codes_RC, scales_RB = encode(wide_RC, code, dice(5, torch.arange(500), 0, 512))
    result_RC = decode(codes_RC, scales_RB, code)
    step = 10 ** (code.decades / (code.num - 1)) - 1
    least_RC = scales_RB.repeat_interleave(BLOCK, 1)[:, :300] * 10**-code.decades
    within = (result_RC - wide_RC).abs() <= torch.maximum(1.001 * step * wide_RC.abs(), 1.001 * least_RC)
    assert step < 0.116
    assert bool(within.all())
    assert torch.equal(result_RC[:7], wide_RC[:7])
    assert torch.equal(result_RC[:, :256].abs().amax(1), wide_RC[:, :256].abs().amax(1))
    assert abs(float((result_RC - wide_RC).sum() / wide_RC.abs().sum())) < 5e-4


@pytest.mark.parametrize("code", CODES, ids=["first", "second"])
def test_the_mean_is_right_between_two_levels(code: Code) -> None:
    """Rounding the logarithm would be off by more than a thousandth. The mean is right below all levels too, except for
    a second moment, which must not become 0."""
    values = levels(code, CPU)
    for at in [20, code.num - 1] + [0] * code.signed:
        value = float(values[at] + values[at + 1]) / 2
        wide_RC = torch.full((400, 256), value)
        wide_RC[:, 0] = 1.0
        result_RC = decode(*encode(wide_RC, code, dice(7, torch.arange(400), 0, 256)), code)
        assert float(result_RC[:, 1:].double().mean()) == pytest.approx(value, rel=8e-4 if at else 0.01)


def test_a_second_moment_above_zero_stays_above() -> None:
    wide_RC = torch.full((1, 256), 1e-30)
    wide_RC[0, 0], wide_RC[0, 1] = 1.0, 0.0
    codes_RC, scales_RB = encode(wide_RC, SECOND, torch.full((1, 256), 0.999))
    assert codes_RC.tolist() == [[255, 0, *[1] * 254]]
    assert float(decode(codes_RC, scales_RB, SECOND)[0, 2]) > 0


def test_what_is_infinite_stays_in_its_place() -> None:
    wide_RC = some(1, 512, SECOND)
    wide_RC[0, 3] = torch.inf
    result_RC = decode(*encode(wide_RC, SECOND, torch.full((1, 512), 0.5)), SECOND)
    assert bool(result_RC.isfinite().all())


def followed(beta: float, target: Tensor, start: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """A moving average in 8 bits, and the true one."""
    true, held, scales = start.clone(), *encode(start, SECOND, torch.full_like(start, 0.5))
    rows = torch.arange(len(start))
    for step in range(num):
        true = beta * true + (1 - beta) * target
        wide = beta * decode(held, scales, SECOND) + (1 - beta) * target
        held, scales = encode(wide, SECOND, dice(step, rows, 0, start.shape[1]))
    return decode(held, scales, SECOND), true


@pytest.mark.parametrize("beta", [0.95, 0.999])
def test_a_moving_average_follows(beta: float) -> None:
    """A step changes it by less than a tenth of a level. Rounding to nearest would keep it where it began."""
    start = torch.full((16, 256), 1.0)
    start[:, 0] = 1e4  # the scale stays
    target = start * 0.2
    target[:, 0] = 1e4
    result, true = followed(beta, target, start, 1500)
    assert float(result[:, 1:].mean()) == pytest.approx(float(true[:, 1:].mean()), rel=0.02)
    assert float(true[:, 1:].mean()) < 0.5


def test_dice() -> None:
    """Dice are even, and independent of their neighbours, of another step and of another moment."""
    rows = torch.arange(700)
    seeds = [1, 2, 1 | 1 << 32, 1 | 1 << 33]
    result = [dice(seed, rows, 0, 512) for seed in seeds]
    assert all(float(each.min()) >= 0 and float(each.max()) < 1 for each in result)
    next_to = [result[0][:-1], result[0][1:], result[0][:-1].roll(1, 1), *(each[:-1] for each in result[1:])]
    related = torch.corrcoef(torch.stack([each.flatten() for each in next_to])) - torch.eye(len(next_to))
    assert float(related.abs().max()) < 0.01
    counts = torch.histc(result[0], 100, 0, 1) / result[0].numel()
    assert float((counts - 0.01).abs().max()) < 0.0005
    assert torch.equal(dice(1, rows[300:], 256, 256), result[0][300:, 256:])


def cut(piece: Piece, whole: Tensor) -> Tensor:
    """Cut from a matrix, or its scales, what a rank has: by its boxes, not by the arguments of `Place`."""
    (num_rows, num_cols), numbers = piece.param.matrix, torch.zeros(piece.shape, dtype=torch.int64)
    for box, view in piece.views(numbers):
        view.copy_(torch.arange(num_rows * num_cols).view(piece.param.shape)[box.slices])
    rows, cols = numbers[:, 0] // num_cols, numbers[:1].flatten() % num_cols
    if whole.shape[1] != num_cols:
        cols = (cols // BLOCK).unique()
    return whole[rows[:, None], cols]


CONFIG = {**tiny.of("qwen3_moe"), **FAMILIES["qwen3_moe"]}
some_whole = functools.cache(some)


def updated(axes: Axes) -> list[dict[str, list[Tensor]]]:
    """Weights, codes and scales after two updates, by rank and name: weights and gradients are cut from the same
    whole matrices, whatever the mesh."""
    blueprint, out = Blueprint.of(CONFIG), []
    for rank in range(axes.world):
        held = pieces(blueprint.spec, axes, rank)
        optimizer = AdamW(state_dtype=torch.uint8, betas=(0.9, 0.999))
        coded = {name: held[name] for name in optimizer.quantised(blueprint.table, held)}
        places = {name: Place(piece.row_numbers, piece.first_col) for name, piece in coded.items()}
        adam = LocalOptimizer(optimizer, blueprint.table, places)
        weights, *grads = [
            {name: cut(each, some_whole(*each.param.matrix, seed=step)).clone() for name, each in coded.items()}
            for step in range(3)
        ]
        for each in grads:
            adam.step(weights, each, 1e-2)
        out.append({
            name: [weights[name], *adam.state.get(name, ()), *adam.state.get(f"{name}.scales", ())]
            for name in coded
        })  # fmt: skip
    return out


@functools.cache
def on_one() -> dict[str, list[Tensor]]:
    return updated(Axes())[0]


def differing(axes: Axes) -> list[str]:
    """Names of what is not on every rank as on one process."""
    expected, wrong = on_one(), list[str]()
    for rank, result in enumerate(updated(axes)):
        held = pieces(Blueprint.of(CONFIG).spec, axes, rank)
        wrong += [
            each for each, tensors in result.items()
            if tensors[0].numel() and not same(tensors, [cut(held[each], whole) for whole in expected[each]])
        ]  # fmt: skip
    return wrong


@pytest.mark.parametrize("axes", [dict(fsdp=3), dict(tp=2), dict(fsdp=2, ep=2)], ids=str)
def test_every_mesh_keeps_the_same_bits(axes: dict[str, int]) -> None:
    assert len(on_one()) > 8
    assert differing(Axes(**axes)) == []


def test_parts_of_an_update_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one()
    monkeypatch.setattr(local, "_PART", 70_000)
    assert differing(Axes()) == []


def test_a_step_takes_the_moments_before_they_are_rounded() -> None:
    """The first step begins at zeros, so it is that of wide moments to the bit; the second no more."""
    place = Place(lambda device: torch.arange(8, device=device), 0)
    table = trials.table_of("a", "a")
    wide, narrow = LocalOptimizer(AdamW(), table), LocalOptimizer(AdamW(state_dtype=torch.uint8), table, {"a": place})
    both = [{"a": some(8, 304)} for _ in range(2)]
    for step, equal in enumerate((True, False)):
        for adam, weights in zip((wide, narrow), both, strict=True):
            adam.step(weights, {"a": some(8, 304, seed=step + 1)}, 0.1)
        assert torch.equal(both[0]["a"], both[1]["a"]) is equal
    assert float((both[0]["a"] - both[1]["a"]).abs().mean()) < 0.01


def test_moments_from_elsewhere_are_rounded_as_by_the_last_step() -> None:
    """So the next step, which throws dice of its own, does not throw the same again."""
    coded = {"a": Place(lambda device: torch.arange(8, device=device), 0)}
    table = trials.table_of("a", "a")
    wide, in_8_bits = LocalOptimizer(AdamW(), table), AdamW(state_dtype=torch.uint8)
    narrow = [LocalOptimizer(in_8_bits, table, coded) for _ in range(2)]
    for adam in (wide, narrow[0]):
        adam.step({"a": some(8, 304)}, {"a": some(8, 304, seed=1)}, 0.1)
    narrow[1].make_state({"a": some(8, 304)})
    narrow[1].steps = 1
    narrow[1].encode("a", wide.state["a"])
    stepped, taken = ([t for both in adam.state.values() for t in both] for adam in narrow)
    assert same(stepped, taken)


def test_every_step_and_moment_has_dice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same dice would round an element the same way in every step, and its moment would drift."""
    seeds: list[int] = []
    monkeypatch.setattr(local, "dice", lambda seed, *where: seeds.append(seed) or dice(seed, *where))
    coded = dict.fromkeys("ab", Place(lambda device: torch.arange(3, device=device), 0))
    adam = LocalOptimizer(AdamW(state_dtype=torch.uint8), trials.table_of("ab", "a"), coded)
    for _ in range(2):
        adam.step({name: some(3, 256) for name in "ab"}, {name: some(3, 256) for name in "ab"}, 0.1)
    assert len({*seeds}) == len(seeds) == 2 * 2 * 2


def test_no_generator_is_drawn_from() -> None:
    before = torch.get_rng_state()
    place = Place(lambda device: torch.arange(3, device=device), 0)
    adam = LocalOptimizer(AdamW(state_dtype=torch.uint8), trials.table_of("a", "a"), {"a": place})
    adam.step({"a": some(3, 256)}, {"a": some(3, 256)}, 0.1)
    assert adam.state["a"][0].dtype == torch.uint8
    assert torch.equal(torch.get_rng_state(), before)


def one_process(source: Path, out: Path) -> Whole:
    engine = engine_of(source, {})
    train(engine, 2)
    mw.save(engine, out)
    return {name: list(both) for name, both in engine.optimizer.state.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Whole]]:
    """Return for a family: its source, a checkpoint of one process after two steps, and the moments in its memory."""

    @functools.cache
    def make(name: str) -> tuple[Path, Path, Whole]:
        at = tmp_path_factory.mktemp(name)
        source = directory(at / "source", name)
        [moments] = worlds.run(1, one_process, source, at / "runs")
        return source, at / "runs" / "step-000002", moments

    return make


def there_and_back(source: Path, reference: Path, whole: Whole, mesh: Mapping[str, int], out: Path) -> list[str]:
    """Name the moments on this rank that differ from those of one process; then save again."""
    engine = engine_of(source, mesh)
    mw.resume(engine, reference)
    wrong = []
    for name, both in engine.optimizer.state.items():
        piece = engine.model.pieces[name.removesuffix(".scales")]
        expected = [cut(piece, each) for each in whole[name]] if piece.param.cols else None
        if expected is not None and not same(list(both), expected):
            wrong.append(name)
    mw.save(engine, out)
    return wrong


MESHES: dict[str, list[dict[str, int]]] = {
    "qwen3_tied": [dict(fsdp=3), dict(pp=2), *([dict(tp=2)] if parts.ALL else [])],
    "qwen3_5_moe": [dict(tp=2, ep=2), *([dict(cp=2), dict(fsdp=2, tp=2, ep=2)] if parts.ALL else [])],
    "qwen3_moe": [dict(fsdp=2, ep=2)] if parts.ALL else [],
}


@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for name in MESHES for mesh in MESHES[name]], ids=str)
def test_every_mesh_resumes_and_saves_the_same(saved: Any, tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    source, reference, whole = saved(name)
    assert worlds.run(world_of(mesh), there_and_back, source, reference, whole, mesh, tmp_path) == [[]] * world_of(mesh)
    assert bytes_of(tmp_path / "step-000002") == bytes_of(reference)


def test_what_lies_in_the_files(saved: Any) -> None:
    _, at, whole = saved("qwen3_tied")
    first = load_file(at / "exp_avg" / "model.safetensors")
    codes, scales = first["model.layers.1.mlp.down_proj.weight"], first["layers.1.mlp.down.weight.scales"]
    assert (codes.dtype, tuple(codes.shape), scales.dtype, tuple(scales.shape)) == (
        torch.uint8, (304, 512), torch.float32, (304, 2)
    )  # fmt: skip
    assert torch.equal(scales, whole["layers.1.mlp.down.weight.scales"][0])
    assert {t.dtype for key, t in first.items() if key.endswith("norm.weight")} == {torch.float32}
    assert not any(key.endswith(".scales") for key in load_file(at / "model.safetensors"))
    assert main(["inspect", str(at), "--verify"]) == 0


def interrupted(source: Path, out: Path, resume: bool) -> tuple[list[float], Any]:
    engine = engine_of(source, dict(fsdp=2))
    if resume:
        mw.resume(engine, out)
    else:
        train(engine, 1)
        mw.save(engine, out, wait=False)
    result = train(engine, 1), state_of(engine)
    engine.wait()  # a rank that ends before would leave no checkpoint
    return result


def test_as_if_never_interrupted(saved: Any, tmp_path: Path) -> None:
    act = functools.partial(interrupted, saved("qwen3_tied")[0], tmp_path / "run")
    before, after = worlds.in_turn(2, {resume: functools.partial(act, resume) for resume in (False, True)}).values()
    assert same(after, before)


def by_torch(source: Path, out: Path, mesh: Mapping[str, int], load: bool) -> None:
    engine = engine_of(source, mesh)
    if load:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=out / "dcp")
        engine.load_state_dict(state)
        mw.save(engine, out / "again")
    else:
        train(engine, 1)
        dcp.save(engine.state_dict(), checkpoint_id=out / "dcp")
        mw.save(engine, out / "ours")


def message_of(act: Callable[[], object]) -> str:
    """Return the error, the package's or torch's."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - that of torch is no Exception
        return str(error)
    return ""


def refused_by_torch(source: Path, out: Path) -> list[str]:
    """Codes are no wide moments, and wide moments no codes."""
    wide, coded = (engine_of(source, {}, state) for state in (None, torch.uint8))
    train(wide, 1)
    dcp.save(wide.state_dict(), checkpoint_id=out / "wide")
    return [
        message_of(lambda: dcp.load(wide.state_dict(), checkpoint_id=out / "dcp")),
        message_of(lambda: dcp.load(coded.state_dict(), checkpoint_id=out / "wide")),
        message_of(lambda: wide.load_state_dict(coded.state_dict())),
    ]


def test_through_torch_and_back(tmp_path: Path) -> None:
    """torch.distributed.checkpoint moves the state between meshes, and `meshwright convert` between the kinds."""
    source, step = directory(tmp_path / "m", "qwen3_moe"), "step-000001"
    worlds.run(2, by_torch, source, tmp_path, dict(fsdp=2, ep=2), False)
    ours = bytes_of(tmp_path / "ours" / step)
    convert = ["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "meshwright", "--like", str(source)]
    assert main(convert) == 0
    assert bytes_of(tmp_path / "back" / step) == ours
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "dcp2"), "--to", "dcp"]) == 0
    (tmp_path / "dcp").rename(tmp_path / "dcp1")
    (tmp_path / "dcp2").rename(tmp_path / "dcp")
    worlds.run(2, by_torch, source, tmp_path, dict(tp=2), True)
    assert bytes_of(tmp_path / "again" / step) == ours
    for message in worlds.run(1, refused_by_torch, source, tmp_path)[0]:
        assert re.search(words(r"exp_avg"), message), message


def of_other_kinds(source: Path, out: Path, steps: int) -> dict[str, Any]:
    """Resume with float32, codes and bfloat16; return the state of each engine. A step works then."""
    result = {}
    for name, state in {"codes": torch.uint8, "float32": None, "bfloat16": torch.bfloat16}.items():
        engine = engine_of(source, {}, state)
        mw.resume(engine, out)
        result[name] = {each: [m.clone() for m in both] for each, both in engine.optimizer.state.items()}
        train(engine, steps)
    return result


def save_wide(source: Path, out: Path) -> Whole:
    engine = engine_of(source, {}, None)
    train(engine, 1)
    mw.save(engine, out)
    return {name: list(both) for name, both in engine.optimizer.state.items()}


def test_another_state_dtype_is_made_of_it(saved: Any, tmp_path: Path) -> None:
    source, reference, whole = saved("qwen3_tied")
    name = "layers.0.mlp.down.weight"
    acts = {
        "true": functools.partial(save_wide, source, tmp_path),
        "from wide": functools.partial(of_other_kinds, source, tmp_path, 0),
        "from codes": functools.partial(of_other_kinds, source, reference, 1),
    }
    [true], [from_wide], [from_codes] = worlds.in_turn(1, acts).values()
    for at, code in enumerate(CODES):
        exact = decode(whole[name][at], whole[f"{name}.scales"][at], code)
        assert torch.equal(from_codes["codes"][name][at], whole[name][at])
        assert torch.equal(from_codes["float32"][name][at], exact)
        assert torch.equal(from_codes["bfloat16"][name][at], exact.bfloat16())
        assert torch.equal(from_wide["float32"][name][at], true[name][at])
        coded = decode(from_wide["codes"][name][at], from_wide["codes"][f"{name}.scales"][at], code)
        assert float(((coded - true[name][at]).abs() / (true[name][at].abs() + 1e-6 * true[name][at].max())).max()) < 1
        assert float((coded - true[name][at]).norm() / true[name][at].norm()) < 0.1
    assert from_wide["float32"].keys() < from_wide["codes"].keys()


def course(source: Path, state: torch.dtype | None) -> tuple[list[float], int, int]:
    optimizer = AdamW(betas=(0.9, 0.999), state_dtype=state)
    engine = mw.Engine(
        mw.load(source, dtype=torch.float32), lr=lambda step: 2e-3 * (1 - step / 40), optimizer=optimizer
    )
    losses = [engine.step(tiny.batches(step % 8)[:1]).loss for step in range(40)]
    held, need = engine.optimizer.num_bytes, engine.model.need(engine.optimizer.options)
    [message] = [stored.num_bytes for stored in need.stored() if stored.what == "moments"]
    return losses, held, message


def test_a_run_of_40_steps(tmp_path: Path) -> None:
    """Losses stay close to those of wide moments, and `need` counts the bytes of both."""
    small = dict(hidden_size=256, intermediate_size=256, num_attention_heads=2, num_hidden_layers=1)
    source = tiny.directory(tmp_path / "m", "qwen3", **{**SIZES, **small})
    both = {state: functools.partial(course, source, state) for state in (None, torch.uint8)}
    [[(wide, wide_bytes, wide_planned)], [(narrow, narrow_bytes, narrow_planned)]] = worlds.in_turn(1, both).values()
    assert wide[0] == narrow[0]
    assert sum(wide[-8:]) < 0.6 * sum(wide[:8])
    assert sum(narrow[-8:]) == pytest.approx(sum(wide[-8:]), rel=0.01)
    assert (wide_planned, narrow_planned) == (wide_bytes, narrow_bytes)
    assert 0.25 < narrow_bytes / wide_bytes < 0.26


def resumed_where_blocks_are_cut(source: Path, reference: Path) -> str:
    engine = engine_of(source, dict(tp=4), None)
    return error_of(lambda: mw.resume(engine, reference))


def test_a_mesh_that_cuts_a_block_is_refused(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, reference, _ = saved("qwen3_tied")
    text = words(
        "LayoutError", r"blocks of 256 columns", "tp=4", r"128 of the 512 columns of layers\.0", r"tp from 1, 2,"
    )
    for message in worlds.run(4, resumed_where_blocks_are_cut, source, reference):
        assert re.search(text, message), message
    run = f'model = "{source}"\nout = "out"\n[[data]]\npath = "x"\n[mesh]\ntp = 4\n[optim]\nstate_dtype = "uint8"\n'
    (tmp_path / "run.toml").write_text(run)
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 2
    assert re.search(words("256 columns", "tp=4", 'state_dtype = "bfloat16"'), capsys.readouterr().err)


def test_betas_have_no_limit_and_dtypes_have_names() -> None:
    assert AdamW(state_dtype=torch.uint8, betas=(0.99, 0.9999)).state_dtype == torch.uint8
    with pytest.raises(mw.ConfigError, match=words(r"torch\.int8", r"torch\.bfloat16", r"torch\.uint8")):
        AdamW(state_dtype=torch.int8)
    assert len(levels(FIRST, CPU)) == 128
