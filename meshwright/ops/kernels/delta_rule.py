"""Launch the Triton kernels of the gated delta rule, and put them under autograd.

`from_state` runs a stream, or the part of it that a rank has, given the state before it. `state_map` computes the state
after the part as a linear function of that state, so that no rank waits for the previous one: see `_part` in
`ops/delta.py`.

A weakness: between forward and backward each head keeps, in addition to its inputs, C + V + K numbers per token and a
state per chunk, 1,152 bytes per token for heads of 128 in bfloat16. Backward could recompute the states, but would be
slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..documents import Documents
from .delta_backward import output_gradients, solved_gradients, state_gradients
from .delta_forward import outputs, prepare, states
from .launch import dense, dense_rows, launch

CHUNK = 64  # tokens
BLOCK = 16  # rows of the chunk's triangular system that are solved one after the other; CHUNK is 4 of them


class Tuning(NamedTuple):
    """The launch parameters of a kernel: columns of values per program or iteration, warps, and pipeline stages."""

    columns: int
    num_warps: int
    num_stages: int


TUNED = {
    prepare: Tuning(64, 8, 1),
    states: Tuning(32, 8, 3),
    outputs: Tuning(64, 8, 1),
    output_gradients: Tuning(32, 8, 2),
    state_gradients: Tuning(32, 8, 3),
    solved_gradients: Tuning(32, 8, 1),
}


@dataclass(frozen=True)
class Stream:
    """Rows of a stream and the documents in them: document n has the rows `bounds[n]` up to `bounds[n + 1]`."""

    positions_T: Tensor
    bounds: Tensor
    num_documents: int


def stream_of(docs: Documents, parts: int, part: int) -> Stream:
    """Cut out the rows of one part. A document that lies in other parts has none."""
    num, num_documents = docs.positions_T.shape[0] // parts, len(docs.bounds) - 1
    if parts == 1:
        return Stream(docs.positions_T, docs.cu_seqlens, num_documents)
    bounds = (docs.cu_seqlens - part * num).clamp(0, num)
    return Stream(docs.positions_T[part * num : (part + 1) * num], bounds, num_documents)


def from_state(inputs: Sequence[Tensor], stream: Stream, state_GRKV: Tensor | None) -> Tensor:
    """Run the rule on at least one row. The first document continues from the state, or begins with an empty one."""
    q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR = inputs
    q_TGK, k_TGK = q_TGK.to(v_TGRV.dtype), k_TGK.to(v_TGRV.dtype)
    o_TGRV: Tensor = _DeltaRule.apply(q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR, state_GRKV, stream)
    return o_TGRV


def state_map(inputs: Sequence[Tensor], stream: Stream) -> Tensor:
    """Compute [A | b] [G, R, K, K + V] in float32: these rows turn the state S before them into A S + b.

    A is the result for the identity as state if no values are written, b the result for an empty state.
    """
    _, k_TGK, v_TGRV, g_TGR, beta_TGR = inputs
    K, (_, G, R, V) = k_TGK.shape[-1], v_TGRV.shape
    identity = torch.eye(K, K + V, dtype=torch.float32, device=v_TGRV.device).expand(G, R, K, K + V)
    padded_TGRV = F.pad(v_TGRV, (K, 0))
    affine: Tensor = _LastState.apply(k_TGK.to(v_TGRV.dtype), padded_TGRV, g_TGR, beta_TGR, identity, stream)
    return affine


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q, k, v, g, beta, state, stream = arguments
        operands = Operands.of(q, k, v, g, beta)
        solved = operands.solved(stream)
        operands.scan(stream, solved, state, last=False)
        ctx.save_for_backward(*operands.tensors(), *solved, stream.positions_T, stream.bounds)
        ctx.num_documents, ctx.has_state = stream.num_documents, state is not None
        return operands.outputs(stream, solved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        *saved, positions_T, bounds = ctx.saved_tensors
        stream, operands = Stream(positions_T, bounds, ctx.num_documents), Operands.of(*saved[:5])
        return *operands.gradients(stream, Solved(*saved[5:]), dense(do), None, ctx.has_state), None


class _LastState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        k, v, g, beta, state, stream = arguments
        operands = Operands.of(k, k, v, g, beta)  # nothing reads q
        solved = operands.solved(stream)
        last = operands.scan(stream, solved, state, last=True)
        ctx.save_for_backward(*operands.tensors()[1:], *solved, stream.positions_T, stream.bounds)
        ctx.num_documents = stream.num_documents
        return last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_last: Tensor) -> tuple[Tensor | None, ...]:
        *saved, positions_T, bounds = ctx.saved_tensors
        stream, operands = Stream(positions_T, bounds, ctx.num_documents), Operands.of(saved[0], *saved[:4])
        _, *grads, _ = operands.gradients(stream, Solved(*saved[4:]), None, d_last, has_state=False)
        return *grads, None, None


class Solved(NamedTuple):
    """Buffers between the kernels, [chunks, heads, ...], in the notation of `delta_forward`. U becomes u."""

    M: Tensor
    U: Tensor
    W: Tensor
    S: Tensor
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class Operands:
    """Inputs as the kernels read them: rows at a regular distance, each of them contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @staticmethod
    def of(*inputs: Tensor) -> Operands:
        q, k, v, g, beta = inputs
        return Operands(dense_rows(q), dense_rows(k), dense_rows(v), dense(g), dense(beta))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def num_chunks(self) -> int:
        return -(-len(self.v) // CHUNK)

    @property
    def num_heads(self) -> int:
        return self.v.shape[1] * self.v.shape[2]

    @property
    def padded(self) -> tuple[int, int]:
        """Return K and V as buffers have them: a tile has a power of two of columns, at least 16."""
        K, V = self.k.shape[-1], self.v.shape[-1]
        return _power_of_two(K), -(-V // _columns(V)) * _columns(V)

    def sizes(self, kernel: Any) -> dict[str, Any]:
        """Return the keyword arguments of a launch: the sizes that the kernel takes, and its tuning."""
        (KP, VP), (columns, num_warps, num_stages) = self.padded, TUNED[kernel]
        columns = min(columns, _columns(self.v.shape[-1]))
        precision = "ieee" if self.v.dtype == torch.float32 else "tf32"  # only applies to float32 products
        q, k, v = self.q, self.k, self.v
        known = {
            "num": len(v), "H": self.num_heads, "R": v.shape[2], "scale": k.shape[-1] ** -0.5, "q_stride": q.stride(0),
            "k_stride": k.stride(0), "v_stride": v.stride(0), "K": k.shape[-1], "V": v.shape[-1], "KP": KP, "VP": VP,
            "BV": columns, "C": CHUNK, "B": BLOCK, "PRECISION": precision,
        }  # fmt: skip
        given = {name: value for name, value in known.items() if name in kernel.arg_names}
        return {**given, "num_warps": num_warps, "num_stages": num_stages}

    def solved(self, stream: Stream) -> Solved:
        """Solve the systems of all chunks; the scan fills S."""
        (KP, VP), chunks = self.padded, (self.num_chunks, self.num_heads)
        M, U, W = (self.v.new_empty(*chunks, CHUNK, width) for width in (CHUNK, VP, KP))
        q_norm, k_norm = (self.v.new_empty(*chunks, CHUNK, dtype=torch.float32) for _ in range(2))
        buffers = (M, U, W, q_norm, k_norm)
        launch(prepare, chunks, *self.tensors(), stream.positions_T, *buffers, **self.sizes(prepare))
        return Solved(M, U, W, self.v.new_empty(*chunks, KP, VP), q_norm, k_norm)

    def scan(self, stream: Stream, solved: Solved, state: Tensor | None, last: bool) -> Tensor:
        """Fill S and turn U into u, from a state [G, R, K, V] or an empty one. Return the last state, if asked for."""
        sizes, H = self.sizes(states), self.num_heads
        first_state = solved.k_norm if state is None else self._padded_state(state)
        last_state = self.v.new_empty(H if last else 0, *self.padded, dtype=torch.float32)
        launch(
            states, (stream.num_documents, H, self.padded[1] // sizes["BV"]),
            self.k, self.g, stream.positions_T, stream.bounds, solved.U, solved.W, solved.k_norm, solved.S,
            first_state, last_state, FIRST=state is not None, LAST=last, **sizes,
        )  # fmt: skip
        return self._unpadded_state(last_state) if last else last_state

    def outputs(self, stream: Stream, solved: Solved) -> Tensor:
        """Compute the outputs."""
        sizes, o = self.sizes(outputs), self.v.new_empty(self.v.shape)
        launch(
            outputs, (self.num_chunks, self.num_heads, self.padded[1] // sizes["BV"]),
            self.q, self.k, self.g, stream.positions_T, solved.U, solved.S, solved.q_norm, solved.k_norm, o, **sizes,
        )  # fmt: skip
        return o

    def gradients(
        self, stream: Stream, solved: Solved, do: Tensor | None, d_last: Tensor | None, has_state: bool
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v, g, beta and the state, given those of the outputs and of the last state."""
        make = self.v.new_zeros if do is None else self.v.new_empty  # without do, no kernel writes the shares
        dU, dk = make(solved.U.shape), make(*self.v.shape[:3], self.k.shape[-1], dtype=torch.float32)
        dg = make(self.g.shape, dtype=torch.float32)
        dq = None if do is None else self._output_gradients(stream, solved, do, (dU, dk, dg))
        dS, d_state = self._state_gradients(stream, solved, do, dU, d_last, has_state)
        dv, dbeta = self.v.new_empty(self.v.shape), torch.empty_like(dg)
        launch(
            solved_gradients, (self.num_chunks, self.num_heads),
            self.k, self.v, self.g, self.beta, stream.positions_T, solved.M, solved.U, solved.S, solved.k_norm, dU, dS,
            dk, dv, dg, dbeta, **self.sizes(solved_gradients),
        )  # fmt: skip
        return dq, dk.sum(2).to(self.k.dtype), dv, dg.to(self.g.dtype), dbeta.to(self.beta.dtype), d_state

    def _output_gradients(
        self, stream: Stream, solved: Solved, do: Tensor, shares: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Return dq and fill the shares of du, dk and dg."""
        dU, dk, dg = shares
        dq = torch.empty_like(dk, dtype=torch.float32 if self.v.shape[2] > 1 else self.q.dtype)
        launch(
            output_gradients, (self.num_chunks, self.num_heads),
            self.q, self.k, self.g, stream.positions_T, solved.U, solved.S, solved.q_norm, solved.k_norm, do, dU,
            dq, dk, dg, **self.sizes(output_gradients),
        )  # fmt: skip
        return dq.sum(2).to(self.q.dtype)

    def _state_gradients(
        self, stream: Stream, solved: Solved, do: Tensor | None, dU: Tensor, d_last: Tensor | None, has_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Complete du; return dS and the gradient of the state before the rows."""
        sizes, H, dS = self.sizes(state_gradients), self.num_heads, torch.empty_like(solved.S)
        d_first = self.v.new_zeros(H if has_state else 0, *self.padded, dtype=torch.float32)
        launch(
            state_gradients, (stream.num_documents, H, self.padded[1] // sizes["BV"]),
            self.q, self.k, self.g, stream.positions_T, stream.bounds, solved.W, solved.q_norm, solved.k_norm,
            self.v if do is None else do, dU, dS, d_first,
            solved.k_norm if d_last is None else self._padded_state(d_last),
            OUTPUTS=do is not None, FIRST=has_state, LAST=d_last is not None, **sizes,
        )  # fmt: skip
        return dS, self._unpadded_state(d_first) if has_state else None

    def _padded_state(self, state_GRKV: Tensor) -> Tensor:
        (KP, VP), (K, V) = self.padded, state_GRKV.shape[2:]
        padded: Tensor = F.pad(state_GRKV.float().flatten(0, 1), (0, VP - V, 0, KP - K)).contiguous()
        return padded

    def _unpadded_state(self, state_HKV: Tensor) -> Tensor:
        unpadded = state_HKV[:, : self.k.shape[-1], : self.v.shape[-1]].contiguous()
        return unpadded.unflatten(0, self.v.shape[1:3])


def _power_of_two(width: int) -> int:
    """Return the least power of two that is at least `width`, and at least 16, the least width of a product."""
    return max(16, triton.next_power_of_2(width))


def _columns(width: int) -> int:
    """Return the most columns of values that a program takes."""
    return min(64, _power_of_two(width))


def _compiled(kernel: Any, V: int = 128, **flags: bool) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """Describe a launch for published models: heads of 128 in bfloat16."""
    meta = [
        torch.empty(CHUNK, *shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 128), (1, 128), (1, 1, V))
    ]
    sizes = Operands.of(*meta, *(torch.empty(CHUNK, 1, 1, device="meta") for _ in range(2))).sizes(kernel)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    float32 = ("g", "beta", "q_norm", "k_norm", "first_state", "last_state", "d_first", "d_last", "dk", "dg", "dbeta")
    numbers = {"positions": "*i64", "bounds": "*i32", "scale": "fp32", **dict.fromkeys(float32, "*fp32")}
    integers = ("num", "H", "R", "q_stride", "k_stride", "v_stride")
    constants = {name: value for name, value in sizes.items() if name not in (*integers, "scale")} | flags
    numbers |= dict.fromkeys(integers, "i32")
    types = {name: numbers.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
    return kernel, types, constants, options


# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
COMPILED = [
    _compiled(prepare),
    _compiled(states, FIRST=False, LAST=False),
    _compiled(states, V=256, FIRST=True, LAST=True),
    _compiled(outputs),
    _compiled(output_gradients),
    _compiled(state_gradients, OUTPUTS=True, FIRST=True, LAST=False),
    _compiled(state_gradients, V=256, OUTPUTS=False, FIRST=False, LAST=True),
    _compiled(solved_gradients),
]
