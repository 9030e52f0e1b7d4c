"""Update whole matrices, for optimizers such as Muon: each matrix on its owner, one bucket at a time (decision 0014).

`MatrixPlan` says which rank computes which matrix and what is sent. A rank sends the parts that it stores to the owner,
in the dtype of the computation, and gets its parts of the result back. While a bucket is computed, the next one is
being sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..axes import STAGE
from ..mesh import Mesh
from ..mesh.collectives import start_all_to_all
from ..sharding import TO_HOLDERS, TO_OWNERS, Box, Bucket, Exchange, MatrixPart, MatrixPlan, Piece, ShardingSpec
from ..watch import waiting_at
from .base import Optimizer

_wait = torch.ops._c10d_functional.wait_tensor
Views = Sequence[tuple[Box, Tensor]]


class WholeMatrices:
    """Updates the matrices of a rank's parameters, together with the other ranks of its pipeline stage and replica."""

    def __init__(self, options: Optimizer, spec: ShardingSpec, mesh: Mesh, pieces: Mapping[str, Piece]) -> None:
        self.options, self.spec, self.mesh, self.pieces = options, spec, mesh, pieces
        self.is_shared = mesh.size_of(STAGE) > 1
        if self.is_shared:  # all ranks make a process group together, also those of stages without matrices
            mesh.process_group(STAGE)
        self._names: tuple[str, ...] = ()
        self._plan: MatrixPlan | None = None

    def plan(self, names: Sequence[str]) -> MatrixPlan:
        """Return the plan for parameters that are updated together. It is computed again only if they change."""
        if self._plan is None or self._names != (*names,):
            params = [self.spec.table[name] for name in names]
            rules, axes, rank = self.spec.rules, self.mesh.axes, self.mesh.rank
            self._plan = MatrixPlan(params, rules, axes, rank, by_head=self.options.by_head)
            self._names = (*names,)
        return self._plan

    def update(
        self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: Mapping[str, Sequence[Tensor]],
        lr: float,
    ) -> None:  # fmt: skip
        """Update the stored pieces in place. `grads` has all these parameters, also those without rows on this rank.
        `state`: as `Optimizer.update` has left it."""
        plan = self.plan([*grads])
        tensors = {name: (grad, *state.get(name, ())) for name, grad in grads.items()}
        step = _Step(self, plan, stored, tensors, lr)
        rounds = [_Round(step, bucket) for bucket in plan.buckets]
        for first in rounds[:1]:
            first.send_to_owners()
        for at, whole in step.directions(plan.resident, {}):
            step.apply(at, [(plan.matrices[at].box, whole)])
        for at, each in enumerate(rounds):
            for later in rounds[at + 1 : at + 2]:
                later.send_to_owners()
            each.compute()
            for earlier in rounds[max(at - 1, 0) : at]:
                earlier.receive()
        for last in rounds[-1:]:
            last.receive()


class _Step:
    """One update of all matrices: where their parts are stored, and how they are read and written."""

    def __init__(
        self, of: WholeMatrices, plan: MatrixPlan, stored: Mapping[str, Tensor],
        tensors: Mapping[str, Sequence[Tensor]], lr: float,
    ) -> None:  # fmt: skip
        self.options, self.mesh, self.table, self.plan, self.lr = of.options, of.mesh, of.spec.table, plan, lr
        self.params = {name: self._views(of.pieces[name], tensor) for name, tensor in stored.items()}
        self.inputs = {
            name: [self._views(of.pieces[name], tensor.contiguous()) for tensor in each]
            for name, each in tensors.items()
            if name in stored
        }
        # A gradient has the dtype of its parameter. A rank that stores no row of any matrix has gradients all the same.
        self.dtype = of.options.matrix_dtype or next(grad.dtype for grad, *_ in tensors.values())

    @staticmethod
    def _views(piece: Piece, tensor: Tensor) -> Views:
        return [*piece.views(tensor)] if tensor.numel() else []

    def own_parts(self, at: int) -> Iterator[Box]:
        """Yield the parts of a matrix that this rank stores."""
        return (box for box, ranks in self.plan.matrices[at].parts if self.mesh.rank in ranks)

    def input(self, at: int, part: Box) -> Tensor:
        """Return a stored part of the input of a matrix's update, on the device and in the dtype of the computation."""
        grad, *state = (_part(views, part) for views in self.inputs[self.plan.matrices[at].name])
        return self.options.matrix_input(grad, state).to(self.mesh.device, self.dtype)

    def directions(
        self, some: Sequence[int], received: dict[int, dict[Box, Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
        """Yield the updates of whole matrices, in the shapes of their boxes; those of one size share calls. `received`:
        the parts that other ranks store, which are dropped as they are read."""
        of_size = defaultdict[tuple[int, int], list[int]](list)
        for at in some:
            of_size[self.plan.matrices[at].rows, self.plan.matrices[at].cols].append(at)
        for size, each in of_size.items():
            zeros = torch.zeros((), dtype=self.dtype, device=self.mesh.device).expand(size)
            num = self.options.matrices_per_call(zeros)
            for first in range(0, len(each), num):
                call = each[first : first + num]
                inputs = [self._whole(at, received.pop(at, {})) for at in call]
                directions = self._call([*inputs, *[zeros] * (num - len(inputs))])
                for at, direction in zip(call, directions, strict=False):
                    yield at, direction.reshape(self.plan.matrices[at].box.shape)

    def _call(self, inputs: Sequence[Tensor]) -> Iterable[Tensor]:
        one = self.options.matrix_direction
        return map(one, inputs) if len(inputs) == 1 else one(torch.stack([*inputs]))

    def _whole(self, at: int, received: Mapping[Box, Tensor]) -> Tensor:
        """Return the whole input of a matrix's update, as [rows, columns]."""
        matrix = self.plan.matrices[at]
        parts = {**received, **{part: self.input(at, part) for part in self.own_parts(at)}}
        whole = parts.get(matrix.box)
        if whole is None:
            whole = torch.empty(matrix.box.shape, dtype=self.dtype, device=self.mesh.device)
            for part, values in parts.items():
                whole[part.within(matrix.box).slices] = values.view(part.shape)
        return whole.reshape(matrix.rows, matrix.cols)

    def apply(self, at: int, parts: Sequence[tuple[Box, Tensor]]) -> None:
        """Update the stored parts of a matrix."""
        matrix = self.plan.matrices[at]
        for part, values in parts:
            param = _part(self.params[matrix.name], part)
            shape, decays = (matrix.rows, matrix.cols), self.table[matrix.name].decay
            self.options.matrix_step(param, values.to(param.device), shape, lr=self.lr, decays=decays)


class _Round:
    """A bucket of matrices, on its way to the owners and back."""

    def __init__(self, step: _Step, bucket: Bucket) -> None:
        self.step, self.bucket = step, bucket
        self.pending: Tensor | None = None  # must not be read before the wait for it

    def send_to_owners(self) -> None:
        """Start the all-to-all of the parts of this bucket."""
        values = [self.step.input(each.at, each.box) for each in self.bucket.to_owners.sends]
        self.pending = self._start(values, self.bucket.to_owners, TO_OWNERS)

    def compute(self) -> None:
        """Compute the matrices that this rank owns, update its own parts, and start to send the other parts back."""
        received: dict[int, dict[Box, Tensor]] = {at: {} for at in self.bucket.own}
        for each, values in self._received(self.bucket.to_owners.receives, TO_OWNERS):
            received[each.at][each.box] = values
        whole = dict[int, Tensor]()
        for at, direction in self.step.directions(self.bucket.own, received):
            whole[at] = direction
            self.step.apply(at, [(part, self._part_of(direction, at, part)) for part in self.step.own_parts(at)])
        results = [self._part_of(whole[each.at], each.at, each.box) for each in self.bucket.to_holders.sends]
        self.pending = self._start(results, self.bucket.to_holders, TO_HOLDERS)

    def receive(self) -> None:
        """Update the parts whose results come from other ranks."""
        for each, values in self._received(self.bucket.to_holders.receives, TO_HOLDERS):
            self.step.apply(each.at, [(each.box, values)])

    def _part_of(self, whole: Tensor, at: int, part: Box) -> Tensor:
        return whole[part.within(self.step.plan.matrices[at].box).slices]

    def _start(self, values: Sequence[Tensor], exchange: Exchange, what: str) -> Tensor:
        step, sizes = self.step, [dict.fromkeys(self.step.plan.group, 0) for _ in range(2)]
        for side, counts in zip((exchange.sends, exchange.receives), sizes, strict=True):
            for each in side:
                counts[each.rank] += each.box.size
        flat = torch.empty(0, dtype=step.dtype, device=step.mesh.device)
        flat = torch.cat([each.reshape(-1) for each in values]) if values else flat
        ins, outs = ([*counts.values()] for counts in sizes)
        with waiting_at(what):
            return start_all_to_all(flat, outs, ins, step.mesh.name_of(STAGE))

    def _received(self, receives: Sequence[MatrixPart], what: str) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Wait for an all-to-all, and yield what it brought."""
        assert self.pending is not None
        with waiting_at(what):
            flat = _wait(self.pending)
        self.pending = None
        parts = flat.split([each.box.size for each in receives]) if receives else ()
        return ((each, part.view(each.box.shape)) for each, part in zip(receives, parts, strict=True))


def _part(views: Views, part: Box) -> Tensor:
    """Return the view of a part, which lies within one of the stored boxes."""
    return next(view[part.within(box).slices] for box, view in views if box.meet(part) == part)
