"""Loss curves of the trainer over 30 steps: every family, chats and texts, on every mesh of 1, 2 and 4 ranks.

    python -m tests.curves                          # all of it, about 10 minutes on two cores
    python -m tests.curves --only qwen3_5_moe text

A step takes 4 streams, so it has 4, 2 or 1 micro-batches, by the number of data ranks. In float64 each loss is held
against one process within 1e-9, in float32 the first one within 1e-5: AdamW amplifies noise after it.
tests/test_train.py takes a few of these runs.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.train import config_file
from meshwright.train.run import run
from tests import runs, worlds

STEPS = 30
MESHES = (
    "fsdp=2", "replicate=2", "tp=2", "cp=2", "pp=2", "fsdp=4", "replicate=2,fsdp=2", "fsdp=2,tp=2", "replicate=2,tp=2",
    "pp=2,fsdp=2", "cp=2,tp=2", "pp=2,cp=2",
)  # fmt: skip
OF_EXPERTS = ("fsdp=2,ep=2", "tp=2,ep=2", "fsdp=4,ep=2", "fsdp=2,tp=2,ep=4", "replicate=2,fsdp=2,ep=2")
FAMILIES = ("qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
KINDS = ("chat", "text")


def texts(path: Path) -> None:
    dice = random.Random(1)
    words = ["over", "the", "lazy", "dog", "x" * 9, "12", "\n"]
    documents = (" ".join(dice.choice(words) for _ in range(dice.randint(3, 90))) for _ in range(400))
    path.write_text("\n\n".join(text.replace("\n", " ") for text in documents))


def curve(at: Path, model: Path, kind: str, mesh: str, dtype: str) -> list[float]:
    at.mkdir()
    (runs.chats if kind == "chat" else texts)(at / ("chats.jsonl" if kind == "chat" else "texts.txt"))
    path = runs.file_of(at, model, train={"dtype": dtype, "steps": STEPS, "epochs": None}, save={"export": False})
    text = path.read_text().replace("epochs = null\n", "")
    if kind == "text":
        text = text.replace("chats.jsonl", "texts.txt").replace(
            "[[data]]\n", '[[data]]\nkind = "text"\nsplit = "paragraph"\n'
        )
    path.write_text(text.replace("lr = 0.01", "lr = 0.003"))
    sets = [f"mesh.{each}" for each in mesh.split(",") if each]
    config = config_file.read(path, sets)
    worlds.run(config.mesh.world, functools.partial(run, config), seconds=300)
    return runs.losses(at)


def main(only: Sequence[str]) -> int:
    began, count, wrong, worst = time.monotonic(), 0, 0, dict.fromkeys(("float64", "float32"), 0.0)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = runs.source(Path(folder) / "model", family)
            for kind in KINDS:
                if only and not {family, kind} >= {*only}:
                    continue
                for dtype in worst:
                    plain = curve(Path(folder) / f"{kind} {dtype}", model, kind, "", dtype)
                    assert len(plain) == STEPS
                    assert plain[-1] < plain[0]
                    for mesh in (*MESHES, *(OF_EXPERTS if "moe" in family else ())):
                        result = curve(Path(folder) / f"{kind} {dtype} {mesh}", model, kind, mesh, dtype)
                        steps = STEPS if dtype == "float64" else 1
                        assert len(result) == STEPS
                        apart = max(abs(a - b) / abs(b) for a, b in zip(result[:steps], plain[:steps], strict=True))
                        count, worst[dtype] = count + 1, max(worst[dtype], apart)
                        if apart > (1e-9 if dtype == "float64" else 1e-5):
                            wrong += 1
                            print(f"{family} {kind} {mesh} {dtype}: {apart:.1e} apart", flush=True)
                print(f"{family} {kind}: {count} runs, worst {worst}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{count} runs, {wrong} wrong, worst {worst}")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    raise SystemExit(main(parser.parse_args().only))
