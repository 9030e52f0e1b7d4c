"""A run file: all mistakes at once, each with its place and the fix; every field can be set and is described."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import meshwright as mw
from meshwright.checkpoint import final_place
from meshwright.checkpoint.manifest import Manifest, write_manifest
from meshwright.objectives import OBJECTIVES
from meshwright.train.config import Config, TrainSection, declared, named, section_of
from meshwright.train.config_checks import num_tokens
from meshwright.train.config_docs import _is_fixed, changed_fields, schema
from meshwright.train.config_file import _independent, as_toml, config_of, read
from meshwright.train.foreign_names import ELSEWHERE, REFUSED, refusal_of
from meshwright.train.run import _loop_options
from tests import write_docs
from tests.schemas import wrong_by_schema

ROOT = Path(__file__).parents[1]
PLAIN = 'model = "a"\nout = "b"\n[[data]]\npath = "x"\n'

MISTAKES = """modle = "Qwen3-8B"
out = 7
[mesh]
fsdp = 2
tp = "2"
[[data]]
path = "chats.jsonl"
kid = "chat"
[[data]]
path = "x"
weight = -1
share = 0.5
[train]
length = 8192
tokens_per_step = 100000
steps = 10
epochs = 3
lr = 1e-5
[optim]
schedule = "cosin"
warmup = 20
eps = nan
"""
DESCRIBED = [
    "model: it is missing",
    "modle (line 1): unknown field; did you mean model?",
    "out (line 2): it should be text in quotes, not 7",
    'mesh.tp (line 5): it should be a whole number, not "2"',
    "data[0].kid (line 8): unknown field; did you mean kind?",
    "data[1].weight (line 11): it should be a number above 0, not -1",
    "train.lr (line 18): unknown field; did you mean lr of [optim]?",
    'optim.schedule (line 20): it should be "constant", "linear", "cosine" or "wsd", not "cosin"; '
    'did you mean "cosine"?',
    "optim.eps (line 22): it should be a finite number, not nan",
    # contradictions among what is left
    "train.epochs (line 17): steps and epochs say when the run ends; give one (--set train.steps= leaves it out)",
    "train.tokens_per_step (line 15): 100000 is not a multiple of length x data ranks, 8192 x 2; take "
    "tokens_per_step = 98304 or 114688",
    "data[0].share (line 6): other sources have a share of the tokens; set it for all sources or for none",
    "optim.warmup (line 21): 20 steps of warm-up, and the run has 10; take fewer, or a share such as 0.03",
]


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


def refused(tmp_path: Path, text: str, *sets: str) -> str:
    with pytest.raises(mw.ConfigError) as error:
        read(written(tmp_path, text), sets)
    return str(error.value)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, MISTAKES)
    assert f"has {len(DESCRIBED)} mistakes" in message
    for line in DESCRIBED:
        assert line in message, message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = ", "is not valid TOML"),
        ("", "data: it is missing"),
        ('model = "a"\nout = "b"\ndata = []\n', "data (line 3): it should be a list of 1, not []"),
        ('model = "a"\nout = "b"\n[[data]]\nkind = "text"\n', "data[0].path (line 3): it is missing"),
        (PLAIN.replace('"a"', "2024-01-01"), "model (line 1): it should be text in quotes, not 2024-01-01"),
        (PLAIN.replace('"x"', "7"), "data[0].path (line 4): it should be text in quotes, or a list, not 7"),
        (PLAIN.replace('"x"', '""'), "it is empty; name a file"),
        (PLAIN + "template_args = {day = 2024-01-01}\n", "it should be a JSON value (no dates), not {day = 2024"),
        (PLAIN + '[train]\ntokens = "lots"\n', "is not a number of tokens"),
        (PLAIN + '[train]\ntokens = "0B"\n', "is not a number of tokens"),
        (PLAIN + "[train]\ntokens = -1\n", "it should be text in quotes, or a number above 0, not -1"),
        (PLAIN + '[train]\ntokens = "1M"\n[optim]\nwarmup = 5\n', "5 steps of warm-up, and the run has 4"),
        (PLAIN + "[mesh]\nfsdp = 3\n", "262144 (32 streams, the default) is not a multiple of length x data ranks, "
         "8192 x 3; take tokens_per_step = 245760 or 270336, or replicate x fsdp of 1, 2, 4, 8, 16, 32"),
        (PLAIN + "[mesh]\nfsdp = 2\nep = 3\n", "mesh.ep (line 7): ep=3 does not divide fsdp*cp*tp=2; choose"),
        (PLAIN + "[mesh]\ntp = true\n", "mesh.tp (line 6): it should be a whole number, not true"),
        (PLAIN + "[mesh]\ndp = 2\n", "did you mean fsdp?"),
        (PLAIN + "[mesh]\nsteps = 2\n", "did you mean steps of [train]?"),
        (PLAIN + "[mash]\ntp = 2\n", "mash (line 5): unknown field; did you mean mesh?"),
        (PLAIN + "[train]\nlearning_rate = 1\n", "did you mean lr of [optim]?"),
        (PLAIN + 'output_dir = "x"\n', "did you mean out at the top?"),
        (PLAIN + "[train]\nxyz = 1\n", "unknown field; known fields: length, "),
        (PLAIN + '[train]\ncompiled = true\nrecompute = "selective"\n', "which compiled=True fuses"),
        (PLAIN + '[train]\nfp8_skip = "layers.0.*"\n', "skips nothing without fp8='block'; give both"),
        (PLAIN + "[optim]\nwarmup = 1.5\n", "it should be a whole number, or a number below 1, not 1.5"),
        (PLAIN + "[optim]\nbetas = [0.9, 2]\n", "a number below 1"),
        (PLAIN + "[optim]\nbetas = [0.9]\n", "it should be a list of 2, not [0.9]"),
        (PLAIN + '[optim]\nschedule = "wsd"\nwarmup = 9\n[train]\nsteps = 10\n', "optim.decay: 9 steps of warm-up"),
        (PLAIN + '[optim]\nstate_dtype = "bfloat16"\nbetas = [0.9, 0.999]\n', "betas of at most 0.98"),
        (PLAIN + "[eval]\nevery = 5\n", "nothing to evaluate"),
        (PLAIN + '[eval]\npath = "y"\nweight = 2\n', "eval.weight (line 7): unknown field"),
        (PLAIN + '[[eval]]\npath = "y"\n', 'eval (line 5): it should be a table, not [{path = "y"}]'),
        (PLAIN + "[save]\nkeep = 0\n", 'it should be a number above 0, or "all", not 0'),
        (PLAIN + "[save]\nkeep_every = 500\n", "500 is not a multiple of every = 200: some of those steps have no "
         "checkpoint; take 600"),
        (PLAIN + "[sample]\nevery = 5\n", "nothing to sample from"),
        (PLAIN + "[optim]\nmax_norm = 0.0\n", "it should be a number above 0, or false, not 0.0"),
        (PLAIN + "[optim]\nmax_norm = 0\n", "it should be a number above 0, or false, not 0"),
        (PLAIN + "[train]\nsteps = 1000000000000000\n", "train.steps (line 6): 1,000,000,000,000,000 steps would take"),
        (PLAIN + '[train]\ntokens = "1000T"\n', "train.tokens (line 6): 3,814,697,266 steps of 262,144 tokens would"),
        (f"x = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        (PLAIN + "[lora]\nr = 8\n", "lora.r (line 6): unknown field; did you mean rank?"),
        (PLAIN + "[train]\nlora_alpha = 8\n", "did you mean alpha of [lora]"),
        (PLAIN + "[lora]\ndropout = 0.1\n", "dropout of adapters is not supported"),
        (PLAIN + "[train]\npacking = true\n", "documents are always packed"),
        (PLAIN + "[train]\nfp16 = true\n", "float16 is not supported"),
        (PLAIN + '[train]\noptimizer = "adamw_torch"\n', "[optim] has the optimizer"),
        (PLAIN + "[grpo]\nbeta = 0.1\n", "Reinforcement learning and losses of your own (GRPO"),
        (PLAIN + '[train]\ndeepspeed = "z3.json"\n', "as ZeRO-3 does"),
        (PLAIN + "[train]\nload-in-4bit = true\n", 'frozen = "nf4" of [train] quantises a frozen base'),
        (PLAIN + "[train]\ngradient_accumulation_steps = 8\n", "gradients are accumulated over"),
        (PLAIN + "[train]\nper_device_train_batch_size = 8\n", "tokens_per_step of [train] is the batch"),
        (PLAIN + "[pipeline]\nstage = 2\n", "did you mean stages?"),
        ('resume = "nevr"\n' + PLAIN, "or a path with a slash, not \"nevr\"; did you mean \"never\"?"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("mesh.tp = true\n" + PLAIN, 1),
        ("# tp = 1\nmesh = {fsdp = 2, tp = true}\n" + PLAIN, 2),
        (PLAIN + "\n[ mesh ]\n# tp = 2\n'tp' = true\n", 8),
        (PLAIN + 'name = """\n[mesh]\ntp = true\n"""\n[mesh]\ntp = true\n', 10),
        (PLAIN.replace("\n", "\r\n") + "[mesh]\r\ntp = true\r\n", 6),
        (PLAIN + "[mesh]\nfsdp = 1\ntp = [\n 1,\n 2,\n]", 7),
    ],
)
def test_the_line_is_right_however_it_is_written(tmp_path: Path, text: str, line: int) -> None:
    assert f"mesh.tp (line {line}): " in refused(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(mw.ConfigError, match="cannot be read"):
        read(tmp_path / "no.toml")
    (tmp_path / "run.toml").write_bytes(b"model = '\xff'")
    with pytest.raises(mw.ConfigError, match="is not valid TOML"):
        read(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [(f"x={'[' * 5000}", "nested too deeply"),
     ("mesh.tp", "write FIELD=VALUE"), ("data.3.weight=1", "list has 1 element"), ("data.x.weight=1", "not an index"),
     ("model.x=1", "model is a value and has no fields"), ("mesh.tq=2", "mesh.tq (--set mesh.tq=2): unknown field"),
     ("mesh.tp=x", 'mesh.tp (--set mesh.tp=x): it should be a whole number, not "x"')],
)  # fmt: skip
def test_what_cannot_be_set(tmp_path: Path, setting: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, PLAIN + "[mesh]\ntp = 2\n", setting)


def test_all_that_cannot_be_set_is_reported_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, PLAIN + "[save]\nkeep = 0\n", "x", "data.9.weight=1", "mesh.tp=0")
    assert "has 4 mistakes" in message


def test_sets(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN + "[train]\nsteps = 9\n")
    config = read(
        path, ["data.0.weight=2", "data.1.path=y", "train.steps= ", "train.epochs=2", "data.0.fields.text=body"]
    )
    assert [(data.path, data.weight) for data in config.data] == [("x", 2.0), ("y", 1.0)]
    assert (config.train.steps, config.train.epochs) == (None, 2.0)
    assert config.data[0].fields == {"text": "body"}
    path.write_bytes(b"\xef\xbb\xbf" + PLAIN.encode())  # with a byte order mark, as Windows writes it
    assert read(path).model == "a"
    empty = written(tmp_path, "")
    assert read(empty, ["model=a", "out=b", "data.0.path=x"]) == read(written(tmp_path, PLAIN))


def places(section: type[BaseModel], at: str = "") -> list[tuple[str, FieldInfo]]:
    out: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        place = f"{at}{name}.0" if name in ("data", "sets") else f"{at}{name}"
        out += places(inner, f"{place}.") if inner else [(place, field)]
    return out


VALUES = {  # where the default says nothing of what else there may be
    "frozen": "nf4", "mtp": "head",
    "mesh": "2", "share": "1", "length": "1024", "tokens_per_step": "65536", "epochs": "2.5", "tokens": "3M",
    "too_long": "drop", "thinking": "true", "betas": "[0.8, 0.9]", "max_norm": "false", "keep": "5", "steps": "4",
    "time_limit": "1.5", "keep_every": "400", "kind": "text", "turns": "last", "split": "line", "on_bad": "skip",
    "resume": "never", "dtype": "float32", "recompute": "full", "router_aux": "previous", "on_nan": "skip",
    "schedule": "wsd", "early_stopping": "3", "prompts": '["Hello"]', "top_p": "0.9", "temperature": "0.7",
    "state_dtype": "bfloat16", "sample.tokens": "9", "pipeline.schedule": "v", "ends": "[2, 4]", "hold": "true",
    "compiled": "true", "optim.kind": "muon", "exclude": '["layers.*"]', "matrix_dtype": "float32",
    "context": "1", "max_pixels": "7", "max_video_pixels": "7", "fps": "3.5",
    "fp8": "block", "fp8_skip": '"layers.0.*"', "expert_rank": "4",
    "objective": "simpo", "dpo.kind": "ipo", "distill.kind": "reverse", "rest": "renormalise", "labels": '["a", "b"]',
    "dims": "[8, 4]", "answers": '["a", "b"]',
}  # fmt: skip
UNUSED = {  # what a field needs that it makes sense, by its name or its section
    "split": ["{section}.kind=text"], "share": ["train.steps=9"], "decay": ["optim.schedule=wsd"], "ep": ["mesh.tp=2"],
    "fp8_skip": ["train.fp8=block"],
    **{key: ["optim.kind=muon"] for key in ("by_head", "momentum", "exclude", "matrix_dtype")},
    "early_stopping": ["eval.path=y"], "eval": ["eval.path=y"], "sample": ['sample.prompts=["x"]'],
    "eval.sets.0": ["eval.sets.0.path=y", "eval.sets.0.name=y"], "best": ["eval.path=y"],
    "fewer": ["launch.max_restarts=1"], "merged": ["lora.rank=4"], "pipeline": ["mesh.pp=2"],
    "eval.images": ["eval.path=y"],
    "eval.sets.0.images": ["eval.sets.0.path=y", "eval.sets.0.name=y"],
    **{name: [f"objective={name}"] for name in OBJECTIVES}, "distill": ["objective=distill", "distill.teacher=y"],
}  # fmt: skip


def value_at(config: Any, place: str) -> Any:
    for part in place.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


@pytest.mark.parametrize(("place", "field"), places(Config), ids=lambda value: value if isinstance(value, str) else "")
def test_every_field_can_be_set(tmp_path: Path, place: str, field: FieldInfo) -> None:
    section, _, name = place.rpartition(".")
    plain = {bool: str(not field.default).lower(), int: "7", float: "0.25", dict: '{a = "b"}'}
    value = VALUES.get(place, VALUES.get(name, VALUES.get(section, plain.get(type(field.default), "other"))))
    next_to = [text.format(section=section) for key in (section, name) for text in UNUSED.get(key, [])]
    sets, path = [*next_to, f"{place}={value}"], written(tmp_path, PLAIN)
    assert value_at(read(path, sets), place) != field.default


def test_what_is_saved_reads_the_same(tmp_path: Path) -> None:
    config = read(written(tmp_path, PLAIN), ['data.0.fields={messages="dia\\"log"}', "train.tokens=2B", "mesh.tp=2"])
    assert read(written(tmp_path, as_toml(config))) == config


def test_the_record_of_an_adapter_leaves_out_what_its_files_say(tmp_path: Path) -> None:
    """Else its defaults would contradict the files when the record is run again."""
    config = read(written(tmp_path, PLAIN + '[lora]\npath = "a"\nalpha = 8\n'))
    assert tomllib.loads(as_toml(config))["lora"] == {"path": "a", "alpha": 8.0}
    assert read(written(tmp_path, as_toml(config))) == config


VALUE = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5,
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(min_size=1, max_size=60),
    st.dictionaries(st.text(), VALUE, max_size=3),
    st.floats(1e-300, 1e300),
    st.integers(0, 9),
)
def test_any_value_is_saved_as_it_was(
    tmp_path: Path, text: str, args: dict[str, Any], lr: float, warmup: int | float
) -> None:
    config = Config.model_validate({
        "model": text, "out": "b", "data": [{"path": [text, "y"], "template_args": args}],
        "optim": {"lr": lr, "warmup": warmup},
    })  # fmt: skip
    (tmp_path / "run.toml").write_text(as_toml(config), encoding="utf-8", newline="")
    assert read(tmp_path / "run.toml") == config


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_right(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#:schema meshwright.schema.json\n")
    assert not list(wrong_by_schema(tomllib.loads(text)))
    assert read(path).out.startswith("runs/")
    assert not list(wrong_by_schema(tomllib.loads(as_toml(read(path)))))


def test_the_schema_refuses_mistakes() -> None:
    result = list(wrong_by_schema(tomllib.loads(MISTAKES)))
    assert len(result) == 9, result
    assert not list(wrong_by_schema(tomllib.loads(PLAIN)))


def test_every_field_is_described() -> None:
    assert all(field.description for _, field in places(Config))
    assert schema()["$defs"]["MeshSection"]["properties"]["tp"]["description"]
    page = (ROOT / "docs" / "train-config.md").read_text()
    assert all(f"`{place.split('.')[-1]}`" in page for place, _ in places(Config))
    for file, text in write_docs.files().items():
        assert file.read_text() == text, f"{file.name} is not what is declared; run python -m tests.write_docs"


def test_a_run_as_the_model_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "first"
    for number, name in enumerate(("checkpoints", "checkpoints", "best"), 1):
        step = final_place(run / name, number)
        step.mkdir(parents=True)
        write_manifest(step, Manifest(number, {}, {}, {}, {}))
    written(run, PLAIN).rename(run / "config.toml")
    path = written(tmp_path, PLAIN)
    for place, wanted in {
        run: run / "checkpoints/step-000002", run / "checkpoints": run / "checkpoints/step-000002",
        run / "best": run / "best/step-000003", run / "checkpoints/step-000001": run / "checkpoints/step-000001",
    }.items():  # fmt: skip
        assert read(path, [f"model={place}"]).model == str(wanted)
        assert config_of(model=str(place), out="b", data=[{"path": "x"}]).model == str(wanted)
    with pytest.raises(mw.ConfigError, match=r"the config has 1 mistake:\n  train\.epochs: steps and epochs"):
        config_of(model="a", out="b", data=[{"path": "x"}], train={"steps": 1, "epochs": 1.0})
    shutil.rmtree(run / "checkpoints")
    message = refused(tmp_path, PLAIN.replace('"a"', f'"{run}"'))
    assert f"model (line 1): {run} is a run without a complete checkpoint so far" in message
    assert "has 1 mistake:" in message


def test_savings_are_those_of_the_engine() -> None:
    for recompute in get_args(TrainSection.model_fields["recompute"].annotation):
        mw.MemoryOptions(recompute=recompute)


def test_names_that_others_use_lead_to_fields() -> None:
    assert {*ELSEWHERE.values()} <= {place for place, _ in declared(Config)}
    assert not {*ELSEWHERE} & {place[-1] for place, _ in declared(Config)}
    assert not {*ELSEWHERE} & {*REFUSED}
    taken = {place[-1] for place, _ in declared(Config)} - {"optim"}  # as a field, the word means an optimizer
    assert not {*REFUSED} & taken
    for section, names in OF_OTHERS.items():
        pairs = [pair.split(":") for pair in names.split()]
        assert {name: ".".join(ELSEWHERE[name]) for name, _ in pairs} == {name: f"{section}.{to}" for name, to in pairs}


# Names in run files of TRL, Axolotl, LLaMA-Factory, torchtitan and Megatron-LM, with our field.
OF_OTHERS = {
    "mesh": "dp_shard:fsdp dp_replicate:replicate tensor_parallel_size:tp pp_size:pp cp_size:cp expert_parallel:ep",
    "optim": "learning_rate:lr lr_scheduler_type:schedule warmup_ratio:warmup min_lr:final max_grad_norm:max_norm "
    "adam_beta2:betas adam_epsilon:eps wd:weight_decay",
    "train": "cutoff_len:length global_batch_size:tokens_per_step num_train_epochs:epochs max_steps:steps bf16:dtype "
    "gradient_checkpointing:recompute torch_compile:compiled patience:early_stopping freeze:train",
    "save": "save_steps:every save_total_limit:keep",
    "eval": "eval_steps:every load_best_model_at_end:best val_file:path",
    "data": "train_file:path chat_template:template columns:fields",
    "log": "logging_steps:every wandb_project:wandb",
    "launch": "ddp_timeout:timeout_s",
    "lora": "lora_rank:rank lora_alpha:alpha target_modules:targets use_rslora:rslora adapter_name_or_path:path",
    "dpo": "pref_beta:beta pref_loss:kind ref_model:reference rpo_alpha:sft_weight",
    "simpo": "simpo_gamma:margin",
    "reward": "center_rewards_coefficient:centre",
    "distill": "teacher_model:teacher",
    "classify": "id2label:labels",
    "embedding": "matryoshka_dims:dims",
}


@pytest.mark.parametrize(
    ("name", "why"),
    [("lora_dropout", "dropout of adapters"), ("LoRA-Dropout", "dropout of adapters"), ("zero3", "fsdp of [mesh]"),
     ("deepspeed_config", "fsdp of [mesh]"), ("packings", ""), ("lr", ""), ("flash-attn", "the fastest attention")],
)  # fmt: skip
def test_names_without_a_field_say_why(name: str, why: str) -> None:
    """Upper case and dashes count as the plain name, and a longer name as its first words."""
    assert bool(why) == bool(refusal_of(name))
    assert refusal_of(name).startswith(why)


@pytest.mark.parametrize(
    ("sets", "changed", "may"),
    [
        ([], [], True),
        (["mesh.tp=2", "optim.lr=2e-5", "save.keep=1"], ["mesh.tp", "optim.lr", "save.keep"], True),
        (["train.epochs=3"], ["train.epochs"], True),
        (["train.tokens_per_step=262144"], [], True),  # the default, written out
        (["train.tokens_per_step=524288"], ["train.tokens_per_step"], False),
        (["train.train=head.*"], ["train.train"], False),
        (["seed=1"], ["seed"], False),
        (["data.0.turns=last"], ["data[0].turns"], False),
        (["data.0.path=/elsewhere/x"], ["data[0].path"], True),
        (["data.1.path=y"], ["data"], False),
        (["eval.path=y"], ["eval.path"], True),
    ],
)  # fmt: skip
def test_what_has_changed_since_a_run_began(tmp_path: Path, sets: list[str], changed: list[str], may: bool) -> None:
    old, new = read(written(tmp_path, PLAIN)), read(tmp_path / "run.toml", sets)
    result = changed_fields(old, new)
    assert [named(each.place) for each in result] == changed
    assert all(each.may == may for each in result)
    assert all(("change it back" in str(each)) != may for each in result)
    if sets == ["seed=1"]:
        assert str(result[0]).startswith("seed: 0 before, 1 now; ")


KEPT = {  # what a resumed run must not change, by section; of the objectives it is all
    "": "seed objective data dpo orpo simpo reward classify distill embedding rerank",
    "data": "kind name fields thinking turns template_args split images too_long on_bad weight share",
    "data.images": "max_pixels max_video_pixels fps",
    "train": "length tokens_per_step tower train frozen mtp",
}  # fmt: skip


def test_a_resumed_run_keeps_its_data_and_its_objective() -> None:
    """Paths may change: checksums of the data and of the template are in the fingerprint of the plan."""
    kept = {f"{section}.{name}".lstrip(".") for section, names in KEPT.items() for name in names.split()}
    of_objectives = {named(place) for place, _ in declared(Config) if place[0] in OBJECTIVES}
    assert {named(place) for place, _ in declared(Config) if _is_fixed(place)} == kept | of_objectives


def test_a_mistake_that_only_follows_from_another_is_left_out() -> None:
    """A wrong field holds a placeholder. Where the mesh is refused, no length is advised for it."""
    path, kind, length, tp = ("data", 0, "path"), ("data", 0, "kind"), ("train", "length"), ("mesh", "tp")
    wrong, conflicts = [(path, "wrong")], [(length, "advice"), (tp, "first")]
    others = iter([(path, "follows"), (kind, "other"), (tp, "second"), ((*path, 0), "follows")])
    assert _independent(wrong, conflicts, others) == [*wrong, (kind, "other"), (tp, "second")]
    assert _independent(wrong, conflicts, [(length, "second"), (kind, "other")]) == [
        *wrong, *conflicts, (kind, "other"),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), [
    ("2B", 2 * 10**9), ("1.5k", 1500), (" 3 m", 3 * 10**6), ("0.5T", 5 * 10**11), (7, 7), ("x", None), ("1.2.3", None),
])  # fmt: skip
def test_numbers_of_tokens(text: str | int, number: int | None) -> None:
    assert num_tokens(text) == number


def test_the_loop_gets_what_the_file_says(tmp_path: Path) -> None:
    """Take values that differ from each other and from the defaults."""
    sections = {
        "save": dict(every=5, keep=3, keep_every=10, wait=True), "eval": dict(path="e", every=7, best=True),
        "train": dict(early_stopping=4, on_nan="skip", time_limit=0.5, steps=9), "sample": dict(prompts=["a"], every=8),
    }  # fmt: skip
    sets = [f"{section}.{name}={value}" for section, of in sections.items() for name, value in of.items()]
    (tmp_path / "run.toml").write_text(PLAIN)
    options = vars(_loop_options(read(tmp_path / "run.toml", [text.replace("True", "true") for text in sets])))
    assert options == dict(
        save_every=5, keep=3, keep_every=10, wait=True, eval_every=7, best=True, patience=4, sample_every=8,
        on_nan="skip", limit_s=1800.0,
    )  # fmt: skip
    assert vars(_loop_options(read(tmp_path / "run.toml", ["save.keep=all"])))["keep"] is None
