"""Values over the tokens themselves, as chat templates and other libraries have them: off by one in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError


def check_aligned(term_T: Tensor, bounds: Sequence[int], fields: Mapping[str, Tensor]) -> None:
    """Refuse fields over the tokens. `term_T` says which tokens have a term: that of token t is about token t+1.

    So such a field is 0 at the first term of each answer, and not 0 at the token behind its last term. As a value of
    the terms, it would stand where nobody ever reads it.
    """
    term_T = term_T.cpu()
    begins = torch.zeros(len(term_T) + 1, dtype=torch.bool, device="cpu")
    begins[list(bounds)] = True
    first_T = term_T & ~(term_T.roll(1) & ~begins[:-1])  # the token before, of the same document, has no term
    last_T = term_T & ~(term_T.roll(-1) & ~begins[1:])
    behind_T = (last_T & ~begins[1:]).roll(1)  # the token before, of the same document, has the last term of an answer
    for name, values in fields.items():
        values_T = values.cpu().nan_to_num() if values.is_floating_point() else values.cpu()
        is_set_T = values_T != 0
        if not (is_set_T & behind_T).any() or (is_set_T & first_T).any():
            continue  # as nearly always
        documents = [slice(a, b) for a, b in pairwise(bounds) if behind_T[a:b].any() and is_set_T[a:b].any()]
        found = {_over_tokens(values_T[d], term_T[d], behind_T[d]) for d in documents}
        if True in found and False not in found:
            raise DataError(
                f"the field {name!r} seems to belong to the tokens: it is 0 at the first term of each answer, and not "
                "0 at the token behind the last. A value at t is for the term of token t, which predicts token t+1. "
                f"Give a mask as trained=, other values to pack as mw.shift({name}). If it is meant so, give 0 where "
                "no label is"
            )


def _over_tokens(values_T: Tensor, term_T: Tensor, behind_T: Tensor) -> bool | None:
    """Whether the values of a document, which are 0 at the first terms of its answers, are over its tokens; None if
    they may be either.

    What may look so without being it: positions, and whatever else rises from 0; scores of all tokens, of which the
    first is 0; numbers of roles, where the first is 0.
    """
    is_set_T = values_T != 0
    run = int(is_set_T.nonzero()[0])  # of zeros, from the first token on
    if run == 0:
        return False
    if len(values_T) < 3 or not (is_set_T & behind_T).any():
        return None
    if (values_T[is_set_T] == values_T[run]).all():
        return True  # a mask, or one advantage for all of an answer
    if run == 1:  # log-probabilities of the tokens have none for the first
        return True if values_T.is_floating_point() and bool((values_T[1:] < 0).all()) else None
    if term_T[:-1].all():  # every token is learnt, so nothing but the zeros says where an answer would be
        rises = values_T[1:] >= values_T[:-1]
        falls = values_T[1:] <= values_T[:-1]
        return values_T.is_floating_point() and not bool(rises.all() or falls.all())
    return not (is_set_T[1:] & ~term_T[:-1]).any()  # 0 but at what is learnt


def refuse_grad(values: object, what: str) -> None:
    if isinstance(values, Tensor) and values.requires_grad:
        raise DataError(f"{what} requires grad, and a batch is data: gradients end here; give {what}.detach()")


def joined(values: Sequence[Any], what: str, device: torch.device | str = "cpu") -> Tensor:
    """Tensors and arrays keep their dtype, except that no values are narrower than float32."""
    try:
        return _joined(values, device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers: {error}") from None


def _joined(values: Sequence[Any], device: torch.device | str) -> Tensor:
    if values and all(hasattr(v, "__array__") for v in values):
        flat = torch.cat([torch.as_tensor(v if isinstance(v, Tensor) else v.copy(), device=device) for v in values])
        return flat.float() if _is_narrow(flat) else flat
    numbers = [x for v in values for x in v]
    flat = torch.tensor(numbers, device=device)
    return torch.tensor(numbers, dtype=torch.float32, device=device) if _is_narrow(flat) else flat


def _is_narrow(flat: Tensor) -> bool:
    """In bfloat16 or float16: given so, or by torch.set_default_dtype."""
    return flat.is_floating_point() and flat.dtype.itemsize < torch.float32.itemsize
