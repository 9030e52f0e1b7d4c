"""AReaL 1.0.4 training engines on Meshwright, one for each role: actor and reference, critic, SFT, reward model, DPO.

AReaL's trainers look up an engine class in `areal.engine` by the prefix of `backend`. `register` replaces these classes
by the ones of this module.
"""

from __future__ import annotations

import copy
from typing import Any

import areal.engine

from .. import api as mw
from .areal_engine import MeshwrightEngine
from .areal_options import EngineOptions

__all__ = [
    "EngineOptions",
    "MeshwrightDPOEngine",
    "MeshwrightEngine",
    "MeshwrightLMEngine",
    "MeshwrightPPOActor",
    "MeshwrightPPOCritic",
    "MeshwrightRWEngine",
    "register",
]

_PREFIXES = {"fsdp": "FSDP", "megatron": "Megatron"}


class MeshwrightPPOActor(MeshwrightEngine):
    """A policy, and a reference without an optimizer, for AReaL's PPO and GRPO."""

    def __init__(self, config: Any) -> None:
        from areal.trainer.ppo.actor import PPOActor

        super().__init__(config)
        self.actor = PPOActor(config, self)

    def compute_logp(self, *args: Any, **kwargs: Any) -> Any:
        """Return log-probabilities of trajectories."""
        return self.actor.compute_logp(*args, **kwargs)

    def compute_advantages(self, *args: Any, **kwargs: Any) -> Any:
        """Add advantages to trajectories."""
        return self.actor.compute_advantages(*args, **kwargs)

    def ppo_update(self, *args: Any, **kwargs: Any) -> None:
        """Train on trajectories with advantages."""
        self.actor.ppo_update(*args, **kwargs)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        """Return AReaL's controller for engines of this class in other processes."""
        from areal.trainer.ppo import actor

        return _controller(cls, config, scheduler, actor.PPOActorController, actor.PPOActorControllerV2)


class MeshwrightPPOCritic(MeshwrightEngine):
    """A critic for AReaL's PPO."""

    def __init__(self, config: Any) -> None:
        from areal.trainer.ppo.critic import PPOCritic

        super().__init__(config)
        self.critic = PPOCritic(config, self)

    def compute_values(self, *args: Any, **kwargs: Any) -> Any:
        """Return values of trajectories."""
        return self.critic.compute_values(*args, **kwargs)

    def ppo_update(self, *args: Any, **kwargs: Any) -> None:
        """Train on trajectories with returns."""
        self.critic.ppo_update(*args, **kwargs)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        """Return AReaL's controller for engines of this class in other processes."""
        from areal.trainer.ppo import critic

        return _controller(cls, config, scheduler, critic.PPOCriticController, critic.PPOCriticControllerV2)


class MeshwrightLMEngine(MeshwrightEngine):
    """A language model for AReaL's SFT."""

    def __init__(self, config: Any) -> None:
        from areal.trainer.sft.lm_engine import LMEngine

        super().__init__(config)
        self.lm_engine = LMEngine(self)

    def train_lm(self, data: Any) -> None:
        """Train on examples."""
        self.lm_engine.train_lm(data)

    def evaluate_lm(self, data: Any) -> None:
        """Evaluate examples."""
        self.lm_engine.evaluate_lm(data)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        """Return AReaL's controller for engines of this class in other processes."""
        from areal.trainer.sft import lm_engine

        return _controller(cls, config, scheduler, lm_engine.LMController, lm_engine.LMControllerV2)


class MeshwrightRWEngine(MeshwrightEngine):
    """A reward model, trained on pairs of a chosen and a rejected answer, which stay in one micro-batch."""

    def __init__(self, config: Any) -> None:
        from areal.trainer.rw.rw_engine import RWEngine

        super().__init__(_in_pairs(config))
        self.rw_engine = RWEngine(self)

    def train_rw(self, data: Any) -> None:
        """Train on pairs."""
        self.rw_engine.train_rw(data)

    def evaluate_rw(self, data: Any) -> None:
        """Evaluate pairs."""
        self.rw_engine.evaluate_rw(data)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        """Return AReaL's controller for engines of this class in other processes."""
        from areal.trainer.rw import rw_engine

        return _controller(cls, config, scheduler, rw_engine.RWController, rw_engine.RWControllerV2)


class MeshwrightDPOEngine(MeshwrightEngine):
    """A policy, and a reference without an optimizer, for AReaL's DPO."""

    def __init__(self, config: Any) -> None:
        from areal.trainer.dpo.dpo_engine import DPOEngine

        super().__init__(_in_pairs(config))
        self.dpo_engine = DPOEngine(self)

    def train_dpo(self, data: Any) -> None:
        """Train on pairs."""
        self.dpo_engine.train_dpo(data)

    def evaluate_dpo(self, data: Any) -> None:
        """Evaluate pairs."""
        self.dpo_engine.evaluate_dpo(data)

    def compute_logp(self, data: Any) -> Any:
        """Return log-probabilities of pairs."""
        return self.dpo_engine.compute_logp(data)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        """Return AReaL's controller for engines of this class in other processes."""
        from areal.trainer.dpo import dpo_engine

        return _controller(cls, config, scheduler, dpo_engine.DPOController, dpo_engine.DPOControllerV2)


def _in_pairs(config: Any) -> Any:
    """Return a config whose micro-batches hold whole pairs of rows."""
    config = copy.deepcopy(config)
    config.mb_spec.granularity = 2
    return config


def _controller(engine: type, config: Any, scheduler: Any, first: Any, second: Any) -> Any:
    """Return a controller of the version that the config names."""
    return (second if config._version == "v2" else first)(train_engine=engine, config=config, scheduler=scheduler)


def register(*backends: str) -> None:
    """Make AReaL's trainers use these engines for configs with one of `backends`: "fsdp", "megatron".

    By default both. A config of backend "fsdp" has the axes d, t and c; one of "megatron" also p and e.
    """
    if unknown := [name for name in backends if name not in _PREFIXES]:
        raise mw.ConfigError(f"backend {unknown[0]!r} cannot be replaced; choose from {', '.join(_PREFIXES)}")
    engines = {
        "PPOActor": MeshwrightPPOActor, "PPOCritic": MeshwrightPPOCritic, "LMEngine": MeshwrightLMEngine,
        "RWEngine": MeshwrightRWEngine, "DPOEngine": MeshwrightDPOEngine,
    }  # fmt: skip
    for backend in backends or _PREFIXES:
        for role, engine in engines.items():
            setattr(areal.engine, _PREFIXES[backend] + role, engine)
