"""Floating-point operations of a model that is trained here, for the share of the peak that a step reaches."""

from __future__ import annotations

from ..engine import Model
from ..plan.devices import peak_of as peak_of
from ..plan.flops import Flops
from ..plan.flops import flops_of as _flops_of


def flops_of(model: Model) -> Flops:
    return _flops_of(model.blueprint, {*model.trained})
