"""Stream weights to inference engines (RL rollouts): whole tensors, their metadata, or shards.

All have the Hugging Face names and layouts of the source, like an export, and derive from one `Handout`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import weights
from ..errors import ConfigError, ExportError, StateError
from ..watch import names_lost_ranks
from ..weight_sync import TensorSpec
from .adapters import check_has_adapters, merged_values
from .agreement import Proposal, agree, check_is_model
from .export import check_shapes, in_dtype, in_format, refuse_overflow_of
from .model import Model

RANKS = ("first", "all")


def stream(
    model: Model, which: str | None = None, *, format: str = "values",  # noqa: A002 - the word of users
    ranks: str = "first", dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield (Hugging Face name, whole tensor) one after the other, in the source's layout. Every rank must exhaust it.

    `ranks`: "first", on the CPU of rank 0 of the mesh, and no items elsewhere; or "all", every tensor on every rank, on
    its device. About 64 MiB are held at a time, or one tensor if it is larger, and as much again while they are
    received. A tensor owns its memory: it is no view of a bucket, so pickling it or sharing it with another process
    takes its own bytes alone, and later steps do not change it.

    Weights come in the dtype of the source, gradients in float32. `dtype`: cast weights before they are sent, except
    float32 parameters (`A_log`), as in `export`. Tensors outside the model (`mtp.*`) are left out.

    `which`: "weight" (the default), "grad"; with adapters (LoRA) there is no default: "merged", the weights with
    their adapters; "adapter", the factors; "weight", weights and factors as they are stored.

    If the source is in 8 bits, weights are dequantised to the dtype of `config.json`. With `format="source"` or `"fp8"`
    they are the FP8 codes and scales that `export` would write.
    """
    with names_lost_ranks():
        yield from _streamed(model, Wanted(chosen(model, which, "stream"), format, dtype), ranks)


def gather(model: Model, which: str | None = None) -> dict[str, Tensor]:
    """Collect `stream` in a dict: complete on rank 0, empty on other ranks."""
    return dict(stream(model, which))


def tensor_specs(
    model: Model, which: str | None = None, *, format: str = "values",  # noqa: A002 - the word of users
    dtype: torch.dtype | None = None,
) -> list[TensorSpec]:  # fmt: skip
    """Return name, shape and dtype of every tensor that `stream` with the same arguments yields, in its order.

    No rank communicates, and no tensor is made: receivers that allocate before weights arrive need it first.
    """
    check_is_model(model)
    handout, specs = handout_of(model, Wanted(chosen(model, which, "tensor_specs"), format, dtype)), list[TensorSpec]()
    for key in handout.keys:
        if key.name in handout.written.scales:
            stored = weights.quantised_keys(handout.written, key.name)
            specs += [TensorSpec(each.name, each.shape, weights.DTYPES[each.dtype]) for each in stored]
        else:
            specs.append(TensorSpec(key.name, key.shape, handout.dtypes[key.name]))
    return specs


def shards(
    model: Model, which: str | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor, weights.ShardSpec]]:
    """Yield (Hugging Face name, values, spec) for each box of a whole tensor that this rank owns.

    `spec` has the shape of the whole tensor, and offset and size of the box. Over all ranks the boxes tile every
    tensor: replicas are left out. Nothing is sent, except the factors of adapters for "merged", which all ranks must
    therefore call. Values are copies on this rank's device. `which`, `dtype`: as in `stream`.
    """
    check_is_model(model)
    model.check_whole()
    wanted = Wanted(chosen(model, which, "shards"), dtype=dtype)
    handout = handout_of(model, wanted)
    if wanted.which == "merged":
        agree(model, "shards(which='merged')", lambda: Proposal(settings={"dtype=": dtype}))
    check_stored(model, handout)
    stored = model.stored_model(values_of(model, handout))
    yield from weights.shards(stored, handout.keymap, handout.keys, dtypes=handout.by_param)


@dataclass(frozen=True)
class Wanted:
    """A choice of tensors to hand out: weights or gradients, in which format or dtype."""

    which: str
    form: str = "values"
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Handout:
    """The tensors to hand out, derived from the declaration alone.

    `keys` are sent; `written` says which of them become FP8 codes and scales where they arrive. `dtypes`: by key.
    `by_param`: the dtypes of gradients, which are not those of the keys.
    """

    wanted: Wanted
    keymap: weights.KeyMap
    written: weights.KeyMap
    keys: list[weights.Key]
    dtypes: Mapping[str, torch.dtype]
    by_param: Mapping[str, torch.dtype] | None


def chosen(model: Model, which: str | None, call: str) -> str:
    """Return what to hand out. Refuse to choose for a model with adapters: its weights without the adapters are the
    base, and nothing would show the mistake.
    """
    check_is_model(model)
    if which is None and model.recipe.lora is not None:
        raise ConfigError(
            'the model has adapters; stream "merged" (weights with adapters), "adapter" (the factors), or "weight" '
            "(both, as they are stored)"
        )
    if which in ("merged", "adapter"):
        check_has_adapters(model, f"{call}(which={which!r})")
    return which or "weight"


def handout_of(model: Model, wanted: Wanted) -> Handout:
    """Return the tensors to hand out. Refuse arguments that do not go together."""
    which, form, dtype = wanted.which, wanted.form, wanted.dtype
    if which not in ("weight", "merged", "adapter", "grad"):
        raise ConfigError(f"stream(model, {which!r}): choose 'weight', 'grad', 'merged' or 'adapter'")
    if which not in ("weight", "merged") and form != "values":
        raise ConfigError(f"stream(which={which!r}, format={form!r}): only weights have another format than 'values'")
    if dtype is not None and (form != "values" or which == "grad"):
        other = "gradients come in their own dtype" if which == "grad" else f"format={form!r} has its own dtypes"
        raise ConfigError(f"stream(which={which!r}, dtype={dtype}): {other}; leave dtype= out")
    keymap = model.keymap.of_adapters() if which == "adapter" else model.keymap
    keymap = keymap.of_base() if which == "merged" else keymap
    keymap = keymap if dtype is None else in_dtype(keymap, model, dtype)
    written, by_param = in_format(keymap, model, form), None
    keys = [k for k in keymap.keys.values() if k.name not in keymap.carried]
    # A file tensor has a gradient if all parameters in it are trained, on any rank. Gradients keep their own dtype.
    if which == "grad":
        made_of, trained, by_param = weights.blocks_by_key(model.table, keymap.choice), {*model.trained}, model.kept
        keys = [k for k in keys if all(p.name in trained for p, _ in made_of[k.name])]
    # Tensors to be quantised are sent as float32 values, from which `quantised_tensors` makes codes and scales.
    keys = [key._replace(dtype="F32") if key.name in written.scales else key for key in keys]
    dtypes = weights.dtypes_of(model.table, keymap, keys, by_param)
    return Handout(wanted, keymap, written, keys, dtypes, by_param)


def check_stored(model: Model, handout: Handout) -> None:
    """Refuse what this rank could not hand out: no gradients, replaced parameters, values that a dtype cannot hold."""
    stored = _stored(model, handout.wanted.which)
    check_shapes(model, stored, model.pieces)
    if handout.written.scales:
        weights.check_scaled(model.stored_model(stored), handout.written)
    if stored and handout.wanted.which in ("weight", "adapter"):
        refuse_overflow_of(model.values(), model, handout.keymap)


def values_of(model: Model, handout: Handout) -> Mapping[str, Tensor]:
    """Return this rank's tensors to hand out. For "merged" all ranks call it: the factors are sent first."""
    if handout.wanted.which != "merged":
        return _stored(model, handout.wanted.which)
    merged = merged_values(model)
    check = functools.partial(refuse_overflow_of, merged, model, handout.keymap)
    model.mesh.together(check, "the merging of adapters", ExportError, "nothing was streamed")
    return merged


def _streamed(model: Model, wanted: Wanted, ranks: str) -> Iterator[tuple[str, Tensor]]:
    """Agree on what to stream, then send and yield tensor by tensor."""

    def propose() -> Proposal:
        check_ranks(ranks)
        check_stored(model, handout_of(model, wanted))
        return Proposal(settings={"format=": wanted.form, "ranks=": ranks, "dtype=": wanted.dtype})

    agree(model, f"stream(which={wanted.which!r})", propose)
    handout, to_all = handout_of(model, wanted), ranks == "all"
    stored, written = model.stored_model(values_of(model, handout)), handout.written
    tensors = weights.whole_tensors(stored, handout.keymap, handout.keys, dtypes=handout.by_param, to_all=to_all)
    for key, tensor in tensors:
        if key.name in written.scales:
            # On the host, where every rank rounds as an export does.
            made = weights.quantised_tensors(written, key.name, tensor.to(model.mesh.host))
            yield from ((name, each.to(tensor.device)) for name, each in made.items())
        else:
            yield key.name, tensor


def check_ranks(ranks: str) -> None:
    """Refuse an unknown choice of receiving ranks."""
    if ranks not in RANKS:
        raise ConfigError(f"ranks={ranks!r} is unknown; choose from {', '.join(map(repr, RANKS))}")


def _stored(model: Model, which: str) -> Mapping[str, Tensor]:
    """Return this rank's weights or gradients. Refuse to hand out gradients before a backward."""
    if which != "grad":
        return model.values()
    grads = model.grads()
    if not grads and model.trainable:  # a pipeline stage may have nothing to train
        raise StateError("the model has no gradients; call engine.backward(batches), and update() only afterwards")
    return grads
