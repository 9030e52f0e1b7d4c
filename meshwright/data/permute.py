"""A permutation of 0..size-1 that needs no memory: what is where is computed, in bulk or for one place.

numpy's own may change between versions, and a run that goes on under another version must see the same documents. So
this one is ours and never changes: a test holds it to a few of its values.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)


def permuted(places: Indices, size: int, *key: int | str) -> Indices:
    """What is at each of `places` of the permutation of `size` that `key` names."""
    half = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    rounds = _round_keys(key)
    out = _feistel(places.astype(np.uint64), half, rounds)
    while (beyond := out >= size).any():  # walk on until it lies inside: the square is at most four times the size
        out[beyond] = _feistel(out[beyond], half, rounds)
    return out.astype(np.int64)


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    digest = hashlib.sha512("\0".join(map(str, key)).encode()).digest()
    return np.frombuffer(digest, dtype="<u8", count=_ROUNDS)


def _feistel(x: NDArray[np.uint64], half: int, rounds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of numbers of `2 * half` bits: each round changes one half by what the other one is."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for key in rounds:
        mixed = (right + key) * _MIX  # wraps around
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << bits) | right
