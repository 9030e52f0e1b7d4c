"""Hashed n-grams of tokens, the rows of Qwen4-Exp's n-gram table that each token looks up.

Each head hashes the last 2, 3, ... tokens to a row of its own part of the table. The config determines the hash, so a
table belongs to one vocabulary and one seed. A document begins as if after end-of-text tokens, and a token after an
end-of-text token sees nothing before it. Both follow from positions and tokens, without a loop over documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # the increment of splitmix64, the odd number next to 2**64 / golden ratio
_TABLE_STEP = 10007  # between the seeds of two tables


@dataclass(frozen=True)
class NgramHash:
    """The hash of one table. `number`: index of the table in the model, from 0. `size`: length of the longest
    n-gram."""

    vocab: int
    size: int
    heads_per_size: int
    first_prime: int  # where the search for the number of rows of each head begins
    row_multiple: int  # the table is padded to a multiple of this
    seed: int
    end: int  # the end-of-text token, which cuts n-grams
    number: int = 0

    @cached_property
    def multipliers(self) -> list[int]:
        """Return an odd factor for each place of an n-gram, small enough that token id times factor stays below
        2**63."""
        half = max(1, ((1 << 63) - 1) // self.vocab // 2)
        base = self.seed + _TABLE_STEP * self.number
        return [2 * (_splitmix64((base + _GAMMA * (k + 1)) & _BITS) % half) + 1 for k in range(self.size)]

    @cached_property
    def rows_of_heads(self) -> list[int]:
        """Return the number of rows of each head: primes from `first_prime` on; earlier tables take the first ones."""
        heads, primes, at = (self.size - 1) * self.heads_per_size, list[int](), self.first_prime
        while len(primes) < (self.number + 1) * heads:
            if at > 1 and all(at % divisor for divisor in range(2, math.isqrt(at) + 1)):
                primes.append(at)
            at += 1
        return primes[self.number * heads :]

    @property
    def offsets(self) -> list[int]:
        """Return the first row of each head."""
        return [sum(self.rows_of_heads[:head]) for head in range(len(self.rows_of_heads))]

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the table, with its padding."""
        return -(-sum(self.rows_of_heads) // self.row_multiple) * self.row_multiple


def ngram_rows(tokens_T: Tensor, positions_T: Tensor, hash_: NgramHash) -> Tensor:
    """Return the table rows that each token looks up, `[T, heads]`: the heads of bigrams first, then of trigrams."""
    same_text_T, grams = torch.ones_like(tokens_T, dtype=torch.bool), []
    hashed_T = tokens_T * hash_.multipliers[0]
    for back in range(1, hash_.size):
        earlier_T = F.pad(tokens_T, (back, 0), value=hash_.end)[: len(tokens_T)]
        # Once an end-of-text token or the start of the document cuts an n-gram, it also cuts all longer ones.
        same_text_T = same_text_T & (positions_T >= back) & (earlier_T != hash_.end)
        hashed_T = hashed_T ^ (earlier_T.where(same_text_T, hash_.end) * hash_.multipliers[back])
        grams += [hashed_T] * hash_.heads_per_size
    sizes = _constant(hash_.rows_of_heads, tokens_T)
    return torch.stack(grams, 1) % sizes + _constant(hash_.offsets, tokens_T)


def _constant(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _splitmix64(state: int) -> int:
    """Return the output of splitmix64 (doi 10.1145/2660193.2660195) for a state."""
    z = (state + _GAMMA) & _BITS
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _BITS
    return z ^ z >> 31
