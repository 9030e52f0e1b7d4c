"""Parts that the Triton kernels of the gated delta rule share: how they load tiles, and the decays of a chunk.

No kernel transposes a tile in registers: Triton 3.4 to 3.7.0 miscompiles `dot(trans(x), y)` on Hopper where x is the
result of a product (flash-linear-attention, issue 640). A tile that is needed transposed is loaded transposed, or
computed as a separate product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Arguments of a kernel are pointers, numbers and constants; Triton infers their types at each launch.

import triton
import triton.language as tl


@triton.jit
def load_rows(at, stride, left, first, width: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Load C rows of a stream [C, W], columns from `first` on; zeros past its end and past the head's `width`."""
    i, c = tl.arange(0, C), first + tl.arange(0, W)
    mask = (i < left)[:, None]
    if width % W != 0:
        mask = mask & (c < width)[None, :]
    return tl.load(at + i[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(at, stride, left, first, width: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Load C rows of a stream as columns [W, C]."""
    i, c = tl.arange(0, C), first + tl.arange(0, W)
    mask = (i < left)[None, :]
    if width % W != 0:
        mask = mask & (c < width)[:, None]
    return tl.load(at + i[None, :] * stride + c[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(at, stride, left, first, tile, width: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Store a tile [C, W] where `load_rows` would load it."""
    i, c = tl.arange(0, C), first + tl.arange(0, W)
    mask = (i < left)[:, None]
    if width % W != 0:
        mask = mask & (c < width)[None, :]
    tl.store(at + i[:, None] * stride + c[None, :], tile.to(at.dtype.element_ty), mask=mask)


@triton.jit
def rows_left(num, start, C: tl.constexpr):
    """Return how many of a chunk's rows lie in the stream, as a 32-bit number: only `start` may be larger."""
    return tl.minimum(num - start, C).to(tl.int32)


@triton.jit
def tile(at, stride: tl.constexpr, first, A: tl.constexpr, B: tl.constexpr):
    """Point at a tile [A, B] of a buffer whose rows have `stride` elements, from column `first` on."""
    return at + tl.arange(0, A)[:, None] * stride + (first + tl.arange(0, B))[None, :]


@triton.jit
def turned_tile(at, stride: tl.constexpr, first, A: tl.constexpr, B: tl.constexpr):
    """Point at the transpose [B, A] of a tile [A, B]."""
    return at + tl.arange(0, A)[None, :] * stride + (first + tl.arange(0, B))[:, None]


@triton.jit
def load_gate(at, start, num, H, C: tl.constexpr):
    """Load the numbers of C tokens from a gate [T, H] of one head; zeros past its end decay and write nothing."""
    row = start + tl.arange(0, C)
    return tl.load(at + row * H, mask=row < num, other=0.0).to(tl.float32)


@triton.jit
def load_positions(at, start, num, C: tl.constexpr):
    """Load the positions of C tokens. Padding continues the last document, so that its state passes through."""
    row = start + tl.arange(0, C)
    inside = tl.minimum(row, num - 1)
    return (tl.load(at + inside) + (row - inside)).to(tl.int32)


@triton.jit
def masked_exp(sums, seen):
    """Exponentiate where `seen`, else 0. Masked sums become 0 first, because their exp may overflow."""
    return tl.where(seen, tl.exp(tl.where(seen, sums, 0.0)), 0.0)


@triton.jit
def decay_within(g, position, C: tl.constexpr):
    """Compute the decay [i, j] from token j to i; 0 above the diagonal and across the start of a document.

    Log decays are summed from j on for each j: in a difference of prefix sums one very negative g would cancel all
    digits of the others.
    """
    i = tl.arange(0, C)
    sums = tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), 0)
    distance = i[:, None] - i[None, :]
    return masked_exp(sums, (distance >= 0) & (position[:, None] >= distance))


@triton.jit
def turned_decay_within(g, position, C: tl.constexpr):
    """Compute the transpose of `decay_within`, by sums of its own."""
    i = tl.arange(0, C)
    sums = tl.cumsum(tl.where(i[None, :] > i[:, None], g[None, :], 0.0), 1)
    distance = i[None, :] - i[:, None]
    return masked_exp(sums, (distance >= 0) & (position[None, :] >= distance))


@triton.jit
def decay_from_start(g, position, C: tl.constexpr):
    """Compute the decay from the state before the chunk to each token; 0 from the first start of a document on."""
    return masked_exp(tl.cumsum(g, 0), position > tl.arange(0, C))


@triton.jit
def decay_to_end(next_g, position, C: tl.constexpr):
    """Compute the decay from each token to the end of the chunk, from the log decays of the tokens after each."""
    i = tl.arange(0, C)
    after = tl.where(i < C - 1, next_g, 0.0)  # not the sum from i minus g_i, which loses digits where g_i is large
    return masked_exp(tl.cumsum(after, 0, reverse=True), last(position, C) >= C - 1 - i)


@triton.jit
def decay_through(g, position, C: tl.constexpr):
    """Compute the decay from the state before the chunk to the state after it."""
    unbroken = last(position, C) > C - 1
    return tl.where(unbroken, tl.exp(tl.where(unbroken, tl.sum(g, 0), 0.0)), 0.0)


@triton.jit
def last(x, C: tl.constexpr):
    """Return the last of C numbers."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0), 0)


@triton.jit
def through_norm(dy, x, r, scale):
    """Compute the gradient of x, given that of y = x r, where r = scale / |x|."""
    return r[:, None] * dy - x * (r * r * r * tl.sum(x * dy, 1) / (scale * scale))[:, None]
