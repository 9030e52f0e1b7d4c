"""python ray_train.py run.toml: a run as a job of Ray Train, one worker for each rank of its mesh.

Ray starts the workers again when one is lost, up to `max_failures` times; the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import meshwright as mw


def rank(options: dict[str, str]) -> None:
    """Ray has joined the workers: the mesh takes their process group."""
    mw.Trainer(mw.train.read(options["file"])).run()


def main(file: str, *, use_gpu: bool = True) -> None:
    config = mw.train.read(file)
    trainer = TorchTrainer(
        rank,
        train_loop_config={"file": file},
        torch_config=TorchConfig(timeout_s=int(config.launch.timeout_s)),
        scaling_config=ScalingConfig(num_workers=config.mesh.world, use_gpu=use_gpu),
        run_config=RunConfig(name="meshwright", failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1])
