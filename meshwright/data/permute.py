"""A stateless pseudo-random permutation of 0..size-1: any element is computed on demand, nothing is stored.

A Feistel network with cycle walking (format-preserving encryption; Black and Rogaway, 2002). numpy's `permutation`
needs 8 bytes per element, and may change between versions: a run that resumes under another numpy must see the same
documents. A test pins some values of this permutation, which never change.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)


def permuted(places: Indices, size: int, *key: int | str) -> Indices:
    """Return the elements at `places` of the permutation of `size` that `key` names.

    The same call for one position or a million gives the same elements, so a rank computes only what it needs, and
    nothing is shuffled in memory at the start of an epoch.
    """
    # Two equal halves: the number of bits is rounded up to an even one.
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    rounds = _round_keys(key)
    result = _feistel(places.astype(np.uint64), half_bits, rounds)
    # Cycle walking: the domain is a power of 4, at most 4 times `size`; results outside are permuted again.
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half_bits, rounds)
    return result.astype(np.int64)


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    """Derive the keys of all rounds from a hash."""
    digest = hashlib.sha512("\0".join(map(str, key)).encode()).digest()
    return np.frombuffer(digest, dtype="<u8", count=_ROUNDS)


def _feistel(x: NDArray[np.uint64], half_bits: int, rounds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute numbers of `2 * half_bits` bits. Each round XORs one half with a hash of the other, so it is invertible
    whatever the hash.

    With 6 rounds of a 64-bit multiply-xorshift mix the permutation is statistically random for shuffling. It is not a
    cipher.
    """
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for key in rounds:
        mixed = (right + key) * _MIX  # wraps around
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << bits) | right
