"""Send only what changed since the last weight sync (RL rollouts that keep their own copy of the weights)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import weights
from ..errors import ConfigError
from ..watch import names_lost_ranks
from .agreement import Proposal, agree, check_is_model
from .model import Model
from .stream import Handout, Wanted, check_ranks, check_stored, chosen, handout_of, values_of


class WeightDeltas:
    """The changes of weights since they were last sent, in the dtype in which they are sent.

    Make it when the receivers have the present weights: right after a whole `stream`, or where both sides loaded the
    same files. Each rank keeps the pieces that it owns, in `dtype`, on the host. All ranks make and use it.
    `which`, `dtype`: as in `stream`.
    """

    def __init__(self, model: Model, which: str | None = None, *, dtype: torch.dtype | None = None) -> None:
        check_is_model(model)
        model.check_whole()
        self._model, self._wanted = model, Wanted(chosen(model, which, "WeightDeltas"), dtype=dtype)
        if which == "grad":
            raise ConfigError("WeightDeltas(which='grad'): gradients are new in every step; stream them whole")
        handout = handout_of(model, self._wanted)
        if which == "merged":
            agree(model, "WeightDeltas(which='merged')", lambda: Proposal(settings={"dtype=": dtype}))
        stored = model.stored_model(values_of(model, handout))
        self._sent = weights.snapshot_of(stored, handout.keymap, handout.keys, handout.dtypes)

    def stream(self, *, ranks: str = "first") -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (Hugging Face name, indices, values) of each tensor with elements whose bits changed. Every rank must
        exhaust it.

        `indices` are sorted positions in the flattened whole tensor, int32 unless it has more than 2**31 - 1 elements.
        `meshwright.weight_sync.apply_delta` writes the values there. `ranks`: as in `mw.stream`. The weights count as
        sent once the last item was taken: if the loop ends earlier, the next call yields the same changes again.
        """
        with names_lost_ranks():
            handout, changed = handout_of(self._model, self._wanted), list[weights.Change]()
            yield from self._changes(handout, changed, ranks)
            # All ranks or none move on: a rank whose receiver failed must not count as sent what others still hold.
            agree(self._model, "the end of WeightDeltas.stream", Proposal)
            weights.move(self._sent, changed)

    def _changes(
        self, handout: Handout, changed: list[weights.Change], ranks: str
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Agree on what to send, then compare and send bucket by bucket."""
        model, wanted = self._model, self._wanted

        def propose() -> Proposal:
            check_ranks(ranks)
            check_stored(model, handout)
            return Proposal(settings={"which=": wanted.which, "dtype=": wanted.dtype, "ranks=": ranks})

        agree(model, "WeightDeltas.stream", propose)
        stored = model.stored_model(values_of(model, handout))
        planned = weights.buckets(stored, handout.keymap, handout.keys, handout.dtypes, [model.mesh.rank])
        yield from weights.send_changes(stored, planned, self._sent, changed, ranks == "all")
