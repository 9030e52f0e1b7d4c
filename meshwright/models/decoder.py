"""The decoder that all families share: embedding -> layers -> norm -> head, as single-device code with doors.

A family supplies the layers. Between them each rank of tp x cp holds its own tokens (sequence parallelism, arXiv
2205.05198); doors in mixers, MLPs, embedding and head change that layout. So this file contains no parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import ENTER, LEAVE, MEET, OWN, SHARE, Block, Box, Door, Init, Layout, Span, belongs_to, plain, weight
from .hf_config import Labels
from .router_balance import Balance
from .vision_tower import Tower, VisionInput

if TYPE_CHECKING:
    from .mtp import MtpHead

Rope = tuple[Tensor, Tensor]
LM_HEAD = "lm_head.weight"  # the key of the vocabulary matrix, or of a tied embedding's copy
SCORE, SCORE_BIAS = "score.weight", "score.bias"  # the keys of a value head, as in transformers' classifiers


class Want(NamedTuple):
    """A request to a forward: one of the `scores` of the head."""

    score: str
    mtp: bool = False  # the MTP head runs too: in training
    temperature: float = 1.0  # of "logprobs" and "entropy"; the MTP head, which drafts, stays at 1
    num_top: int = 0  # of "top_logprobs": how many
    candidates: str = ""  # next to "logprobs": the field of a batch with token ids `[T, K]` to score too, if any
    candidate_temperature: float = 1.0
    rest: bool = False  # next to candidates: the log-probability of all other tokens of the vocabulary
    ids_TK: Tensor | None = None  # the candidates of a micro-batch

    def of(self, fields: Mapping[str, Tensor]) -> Want:
        """Return the request for a micro-batch with these fields."""
        return self._replace(ids_TK=fields[self.candidates]) if self.candidates else self


@dataclass(frozen=True)
class Shape:
    """The sizes that embedding, norms and head need. A family fills it from its `config.json`."""

    vocab: int
    width: int
    eps: float
    rotary: ops.Rotary
    tied: bool
    std: float
    labels: Labels  # of a value head
    zero_centred: bool = False  # whether norms multiply by 1 + weight (Gemma's and Qwen3.5's) or by weight
    sections: tuple[int, int, int] | None = None  # M-RoPE's frequencies a time, height and width; None: 1D positions
    reads_tokens: bool = False  # whether layers read the tokens of the whole stream, as hashes of n-grams do
    streams: int = 1  # residual streams of a token, each of the width (hyper-connections)

    @property
    def stream_width(self) -> int:
        """Return the elements per token that a layer hands to the next one."""
        return self.width * self.streams


class Norm(nn.Module):
    """RMSNorm over the width of a token. It sees this rank's own tokens only, so its gradient is a partial sum.

    `axes_left_to_sum` implies the sum over tp; Megatron's flag `sequence_parallel` on such weights does the same.
    """

    def __init__(self, shape: Shape, key: str, width: int | None = None, dim: str = "embed") -> None:
        super().__init__()
        self.eps, self.zero_centred = shape.eps, shape.zero_centred
        init = Init("zeros" if shape.zero_centred else "ones")
        self.weight = weight(rows={dim: width or shape.width}, key=key, decay=False, init=init)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)


class Embedding(nn.Module):
    """Vocab-parallel embedding: each tp rank holds some rows of the table."""

    def __init__(self, shape: Shape, at: str) -> None:
        super().__init__()
        rows, cols = {"vocab": shape.vocab}, {"embed": shape.width}
        layouts = [plain(at + "embed_tokens.weight", (shape.vocab, shape.width), 1, "one")]
        if shape.tied:  # some files of tied models store the head once more, some do not
            layouts.append(_with_copy(layouts[0], LM_HEAD))
        self.weight = weight(
            rows, cols, layouts=layouts, group="head" if shape.tied else "", init=Init("normal", shape.std)
        )
        self.vocab = Span("vocab", shape.vocab)
        self.leave = Door(LEAVE, shape.width)
        self.compute = torch.float32  # the compute dtype: activations of all layers have it

    def forward(self, tokens_T: Tensor, none_T: Tensor | None = None) -> Tensor:
        """Embed tokens; zeros for the tokens of `none_T`, in whose places image features go."""
        # Tokens of other ranks' rows look up row 0 and are zeroed, so that shapes do not depend on the data.
        row_T = tokens_T - self.vocab.start
        is_local_T = (row_T >= 0) & (row_T < len(self.vocab))
        if none_T is not None:
            is_local_T = is_local_T & ~none_T
        x_TD = ops.lookup(self.weight, row_T.where(is_local_T, 0)).to(self.compute) * is_local_T[:, None]
        return self.leave(x_TD)  # reduce-scatter: each token's row is on one rank, the others add exact zeros


def _with_copy(layout: Layout, key: str) -> Layout:
    """Return a layout whose files hold the matrix under a second key too."""
    block = layout.blocks[0]
    return Layout("twice", layout.blocks, (Block(block.ours, key, block.shape, Box.whole(block.shape)),))


class Tied(nn.Module):
    """The matrix of a tied embedding on the last of several pipeline stages, where no token is looked up."""

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self.weight = embed.weight


class Layer(nn.Module):
    """A pre-norm transformer layer: `x += mixer(norm(x)); x += mlp(norm(x))`.

    `needs_output`: backward needs what the last part returns, so a recomputed layer runs that part to its end.
    """

    needs_output = False

    def __init__(self, shape: Shape, mixer: nn.Module, mlp: nn.Module, at: str) -> None:
        super().__init__()
        self.norm = Norm(shape, at + "input_layernorm.weight")
        self.mixer = mixer
        self.mlp_norm = Norm(shape, at + "post_attention_layernorm.weight")
        self.mlp = mlp
        self.run: Callable[[Tensor, Rope, ops.Documents], Tensor] = self.block  # `parallel.recompute` may replace it

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        return self.run(x_TD, rope, docs)

    def block(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        """Run the layer itself, without checkpointing or compilation."""
        x_TD = x_TD + self.mixer(self.norm(x_TD), rope, docs)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


# The trunk's hidden states of own tokens, before and after the final norm -> the state of the MTP head, its labels, and
# whether its gradient ends there.
Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, bool]]


class LanguageHead(nn.Module):
    """Final norm and vocabulary scores. `[T, V]` logits exist in full only if a caller asks for them."""

    scores = ("logprobs", "entropy", "logits", "target_logits", "top_logprobs")

    def __init__(self, shape: Shape, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        rows, cols = {"vocab": shape.vocab}, {"embed": shape.width}
        # A tied head declares nothing: `forward` gets the embedding's matrix.
        own = weight(rows, cols, key=LM_HEAD, init=Init("normal", shape.std))
        self.weight = None if shape.tied else own
        self.vocab = Span("vocab", shape.vocab)
        self.enter = Door(ENTER, shape.width)
        self.meet = Door(MEET, 3, floats=True)  # wider where candidates are scored: no bill has them
        self.own = Door(OWN, 0)
        self.mtp: MtpHead | None = None

    def forward(
        self, x_TD: Tensor, labels_T: Tensor, want: Want, tied_VD: Tensor | None, predict: Predict | None = None
    ) -> tuple[Tensor, ...]:
        """Return scores, and with `predict` those of the MTP head: log-probabilities, and whether each label is the
        likeliest token."""
        weight_VD = self.weight if tied_VD is None else tied_VD
        assert weight_VD is not None
        h_TD = self.norm(x_TD)
        scores = self.score(h_TD, labels_T, want, weight_VD)
        if predict is None:
            return scores
        z_TD, next_labels_T, detached = predict(x_TD, h_TD)
        stats_NT3 = self.stats(z_TD, next_labels_T, weight_VD.detach() if detached else weight_VD)
        return (*scores, ops.combine_stats(stats_NT3)[0], ops.is_likeliest(stats_NT3))

    def score(self, x_TD: Tensor, labels_T: Tensor, want: Want, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Return the scores that `want` names, from the output of the final norm."""
        if want.ids_TK is not None:
            return self.score_candidates(x_TD, labels_T, want, weight_VD)
        if want.score == "top_logprobs":
            return self.top_logprobs(x_TD, want, weight_VD)
        if want.score in ("logprobs", "entropy"):
            entropy = want.score == "entropy"
            logprobs_T, entropy_T = ops.combine_stats(self.stats(x_TD, labels_T, weight_VD, entropy, want.temperature))
            return (logprobs_T, entropy_T) if entropy else (logprobs_T,)
        x_TD = self.enter(x_TD)
        if want.score == "target_logits":  # before the product: a row is as wide as the vocabulary
            x_TD = x_TD[labels_T >= 0]
        return (ops.upcast(ops.linear(x_TD, weight_VD)),)

    def score_candidates(self, x_TD: Tensor, labels_T: Tensor, want: Want, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Return what `want` names, the log-probabilities of its candidates, 0 where it has none, `[T, K]`, and with
        `want.rest` that of all other tokens of the vocabulary, `[T]`."""
        assert want.ids_TK is not None, "the caller has looked"
        entropy, num_own, start = want.score == "entropy", len(x_TD), self.vocab.start
        candidates = ops.Candidates(want.ids_TK - start, want.candidate_temperature, want.rest)
        stats_TS = ops.candidate_stats(
            self.enter(x_TD), weight_VD, labels_T - start, candidates, entropy, want.temperature
        )
        stats_NTS = self.meet(stats_TS).view(-1, num_own, stats_TS.shape[1])
        combined = ops.combine_candidate_stats(stats_NTS, want.ids_TK.shape[1])
        logprobs_T, entropy_T, of_candidates_TK, rest_TR = combined
        of_candidates_TK = of_candidates_TK.masked_fill(self.own(want.ids_TK) < 0, 0.0)
        own = (logprobs_T, entropy_T) if entropy else (logprobs_T,)
        return (*own, of_candidates_TK, *rest_TR.unbind(-1))

    def top_logprobs(self, x_TD: Tensor, want: Want, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Return the log-probabilities of the likeliest next tokens, and their ids as floating point numbers."""
        num_own, k = len(x_TD), want.num_top
        best_TS = ops.top_k(self.enter(x_TD), weight_VD, k, want.temperature)
        best_TS[:, 1 + k :] += self.vocab.start
        return ops.combine_top_k(self.meet(best_TS).view(-1, num_own, 1 + 2 * k))

    def stats(
        self, x_TD: Tensor, labels_T: Tensor, weight_VD: Tensor, entropy: bool = False, temperature: float = 1.0
    ) -> Tensor:  # fmt: skip
        """Return three numbers for each own token and slice of the vocabulary. -> stats_NT3"""
        # Labels are shifted into this rank's slice of the vocabulary; those of other slices become out of range.
        labels_T, own_tokens = labels_T - self.vocab.start, len(x_TD)
        stats_T3 = ops.token_stats(self.enter(x_TD), weight_VD, labels_T, entropy=entropy, temperature=temperature)
        # An all-to-all gives each rank the stats of all slices for its own tokens: [T, 3] instead of [T, V] travels.
        return self.meet(stats_T3).view(-1, own_tokens, 3)


class ValueHead(nn.Module):
    """One score a token and label: `[T, labels]`, or `[T]` with one label. Like the norm it sees own tokens only."""

    scores = ("values",)

    def __init__(self, shape: Shape, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        labels, init = shape.labels, Init("normal", shape.std)
        rows, cols = {"label": labels.num}, {"embed": shape.width}
        self.weight = weight(rows, cols, key=SCORE, init=init, optional=labels.new)
        self.bias = weight(rows, key=SCORE_BIAS, decay=False, init=Init("zeros")) if labels.bias else None

    def forward(
        self, x_TD: Tensor, labels_T: Tensor, want: Want, tied_VD: Tensor | None, predict: Predict | None = None
    ) -> tuple[Tensor, ...]:
        values_TL = ops.upcast(ops.linear(self.norm(x_TD), self.weight, self.bias))
        return (
            values_TL.squeeze(-1).clone(),
        )  # a copy: FSDP warns of views, whose in-place change would lose its hook


class NoHead(nn.Module):
    """Final norm only: hidden states."""

    scores = ("hidden",)

    def __init__(self, shape: Shape, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(
        self, x_TD: Tensor, labels_T: Tensor, want: Want, tied_VD: Tensor | None, predict: Predict | None = None
    ) -> tuple[Tensor, ...]:
        return (self.norm(x_TD),)


HEAD_OF: dict[str, type[LanguageHead | ValueHead | NoHead]] = {"lm": LanguageHead, "value": ValueHead, "none": NoHead}


class Decoder(nn.Module):
    """A model. `forward` takes the whole packed stream of a data rank and returns scores of this rank's own tokens.

    A pipeline stage is a decoder with some of the layers. All but the first stage take `x_TD`, the activations of this
    rank's tokens from the stage before; all but the last have no head and return activations.
    """

    embed: Embedding | Tied | None
    head: LanguageHead | ValueHead | NoHead | None

    def __init__(
        self, shape: Shape, at: str, blocks: Sequence[Callable[[str], nn.Module]], head: str,
        balance: Balance | None = None, norm: Callable[[str], nn.Module] | None = None,
    ) -> None:  # fmt: skip
        """`norm`: makes the module between the residual stream and the head, from the key prefix; RMSNorm by
        default."""
        super().__init__()
        if head not in HEAD_OF:
            raise ConfigError(f"head={head!r} is unknown; choose from {', '.join(HEAD_OF)}")
        self.shape = shape
        self.balance = balance or Balance()
        self.tied = shape.tied and head == "lm"
        self.tower: Tower | None = None
        self.embed = Embedding(shape, at)
        # A dict by number and not a list: a pipeline stage keeps the numbers of the whole model, and so all parameter
        # names.
        self.layers = nn.ModuleDict({str(i): block(f"{at}layers.{i}.") for i, block in enumerate(blocks)})
        self.head = HEAD_OF[head](shape, norm(at) if norm is not None else Norm(shape, at + "norm.weight"))
        self.share = Door(SHARE, 0)
        belongs_to(self.embed, first=True)
        for number, layer in self.layers.items():
            belongs_to(layer, layer=int(number))
        self.scores = HEAD_OF[head].scores  # the values that `want` of a forward may have

    def with_layers(self, numbers: Iterable[int]) -> Decoder:
        """Return the model with only these of its layers, and without a tower; modules are shared, not copied."""
        part = self.part(numbers, first=True, last=True)
        part.embed, part.head, part.tower = self.embed, self.head, None
        return part

    def part(self, layers: Iterable[int], *, first: bool, last: bool) -> Decoder:
        """Return a pipeline stage: some of the layers, under their own numbers.

        So parameter names are those of the whole model.
        """
        stage = Decoder.__new__(Decoder)  # not copy.copy: it would share the hook dicts that torch keeps on a module
        nn.Module.__init__(stage)
        stage.shape, stage.balance, stage.share = self.shape, self.balance, self.share
        stage.tied, stage.scores = self.tied, self.scores
        stage.tower = self.tower if first else None
        tied = Tied(self.embed) if self.tied and isinstance(self.embed, Embedding) else None
        stage.embed = self.embed if first or (last and self.mtp is not None) else tied if last else None
        stage.layers = nn.ModuleDict({str(number): self.layers[str(number)] for number in layers})
        stage.head = self.head if last else None
        return stage

    @property
    def mtp(self) -> MtpHead | None:
        """Return the MTP head, if it is trained, on the stage that has it."""
        return self.head.mtp if isinstance(self.head, LanguageHead) else None

    @property
    def every_layer(self) -> list[nn.Module]:
        """Return the layers of the trunk, and that of the MTP head."""
        return [*self.layers.values(), *([] if self.mtp is None else [self.mtp.layer])]

    @property
    def vocabulary(self) -> str:
        """Name the parameter whose rows score the vocabulary; empty without such a head."""
        if not isinstance(self.head, LanguageHead):
            return ""
        return "embed.weight" if self.tied else "head.weight"

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the compute dtype: what the embedding and the tower output, and so what all layers work in."""
        assert isinstance(self.embed, Embedding), "a whole model has one"
        self.embed.compute = dtype
        if self.tower is not None:
            self.tower.compute = dtype

    def units(self) -> list[nn.Module]:
        """Return the modules that FSDP gathers and frees together.

        A tied embedding stays with the root: two places use it.
        """
        ends = (None, None) if self.tied else (self.embed, self.head)
        tower = [] if self.tower is None else self.tower.units()
        return [unit for unit in (*tower, ends[0], *self.layers.values(), self.mtp, ends[1]) if unit is not None]

    def kept_units(self) -> list[nn.Module]:
        """Return the units that stay gathered from forward to backward: those with which backward begins, and an
        embedding in which the MTP head looks up tokens a second time."""
        twice = [self.embed] if self.mtp is not None and not self.tied and self.embed is not None else []
        return [self, *self.units()[-1:], *([] if self.mtp is None else [self.mtp]), *twice]

    def forward(
        self, tokens_T: Tensor, labels_T: Tensor, docs: ops.Documents, want: Want, x_TD: Tensor | None = None,
        sight: VisionInput | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run the stage.

        `want`: what the head computes. `sight`: the images of the first stage, if this rank has any.
        """
        stream_T = tokens_T
        rows: tuple[
            Tensor, ...
        ] = ()  # image features: for the embedding, then for each of the first layers (deepstack)
        docs, is_first = replace(docs, tokens_T=tokens_T) if self.shape.reads_tokens else docs, x_TD is None
        if x_TD is None:
            assert self.embed is not None, "the first stage has it"
            tokens_T, none_T = self.share(tokens_T), None
            if sight is not None:
                assert self.tower is not None, "images without a tower were refused"
                rows, none_T, at_N = self.tower(sight), self.tower.is_place(tokens_T), sight.at_N
            x_TD = self.embed(tokens_T, none_T)
        dtype, turns = ops.upcast(x_TD[:0]).dtype, docs.positions_T if docs.turns_T3 is None else docs.turns_T3
        # Tables are computed once a forward, for this rank's tokens; all layers share them.
        rope = ops.rope_tables(self.share(turns), self.shape.rotary, dtype, self.shape.sections)

        # DeepStack adds features of deeper blocks of the tower to the first layers, not only to the embedding.
        def with_rows(x_TD: Tensor, number: int) -> Tensor:
            return x_TD.index_add(0, at_N, rows[number]) if number < len(rows) else x_TD

        x_TD = with_rows(x_TD, 0)
        if is_first and self.shape.streams > 1:
            x_TD = x_TD.repeat(1, self.shape.streams)
        for number, layer in enumerate(self.layers.values(), 1):
            x_TD = with_rows(layer(x_TD, rope, docs), number)
        if self.head is None:
            return (x_TD,)
        tied_VD = self.embed.weight if self.tied and self.embed is not None else None
        predict = None
        if want.mtp:
            predict = partial(self._predict, stream_T, labels_T, rope, docs)
        if want.ids_TK is not None:
            want = want._replace(ids_TK=self.share(want.ids_TK))
        return tuple(self.head(x_TD, self.share(labels_T), want, tied_VD, predict))

    def _predict(
        self, tokens_T: Tensor, labels_T: Tensor, rope: Rope, docs: ops.Documents, x_TC: Tensor, h_TD: Tensor
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Run the MTP head on own tokens; return its states, their labels, and whether its gradient ends there.

        Tokens and labels are shifted along the whole stream, before this rank takes its own: shifting after the split
        would lose the last one of each rank (NeMo-Automodel#3544).
        """
        assert self.mtp is not None, "the last stage has it"
        assert isinstance(self.embed, Embedding), "the last stage has it too"
        hidden_TC = x_TC if self.mtp.reads_streams else h_TD
        with torch.no_grad() if self.mtp.detached else contextlib.nullcontext():
            next_TD = self.embed(self.share(ops.next_in_document(tokens_T, docs, 0)))
        z_TD = self.mtp(hidden_TC.detach() if self.mtp.detached else hidden_TC, next_TD, rope, docs)
        return z_TD, self.share(ops.next_in_document(labels_T, docs, -100)), self.mtp.detached
