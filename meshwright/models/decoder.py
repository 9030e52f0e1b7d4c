"""What all families share: tokens -> embedding -> layers -> norm -> head. Single-device code with doors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import ENTER, LEAVE, MEET, SHARE, Block, Box, Door, Init, Layout, Span, belongs_to, plain, weight
from .hf_config import Labels
from .router_balance import Balance
from .vision_tower import Tower, VisionInput

Rope = tuple[Tensor, Tensor]
LM_HEAD = "lm_head.weight"  # the key of the vocabulary matrix, or of a tied embedding's copy
SCORE, SCORE_BIAS = "score.weight", "score.bias"  # the keys of a value head


@dataclass(frozen=True)
class Shape:
    """What embedding, norms and head need to know. A family fills it from its `config.json`."""

    vocab: int
    width: int
    eps: float
    rotary: ops.Rotary
    tied: bool
    std: float
    labels: Labels  # of a value head
    zero_centred: bool = False  # norms: 1 + w
    sections: tuple[int, int, int] | None = None  # of RoPE, where tokens have a time, a height and a width


class Norm(nn.Module):
    """RMS norm over the width of a token. It sees this rank's own tokens, so its gradient is a share, to be summed."""

    def __init__(self, shape: Shape, key: str, width: int | None = None, dim: str = "embed") -> None:
        super().__init__()
        self.eps, self.zero_centred = shape.eps, shape.zero_centred
        init = Init("zeros" if shape.zero_centred else "ones")
        self.weight = weight(rows={dim: width or shape.width}, key=key, decay=False, init=init)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)


class Embedding(nn.Module):
    def __init__(self, shape: Shape, at: str) -> None:
        super().__init__()
        rows, cols = {"vocab": shape.vocab}, {"embed": shape.width}
        layouts = [plain(at + "embed_tokens.weight", (shape.vocab, shape.width), 1, "one")]
        if shape.tied:  # hub files of tied models hold the head once more, or do not
            layouts.append(_with_copy(layouts[0], LM_HEAD))
        self.weight = weight(
            rows, cols, layouts=layouts, group="head" if shape.tied else "", init=Init("normal", shape.std)
        )
        self.vocab = Span("vocab", shape.vocab)
        self.leave = Door(LEAVE, shape.width)
        self.compute = torch.float32  # the dtype of what all layers are given

    def forward(self, tokens_T: Tensor, none_T: Tensor | None = None) -> Tensor:
        """Zeros for the tokens of `none_T`."""
        row_T = tokens_T - self.vocab.start
        here_T = (row_T >= 0) & (row_T < len(self.vocab))
        if none_T is not None:
            here_T = here_T & ~none_T
        x_TD = ops.lookup(self.weight, row_T.where(here_T, 0)).to(self.compute) * here_T[:, None]
        return self.leave(x_TD)  # each token's row lives on one rank: the others add exact zeros


def _with_copy(layout: Layout, key: str) -> Layout:
    block = layout.blocks[0]
    return Layout("twice", layout.blocks, (Block(block.ours, key, block.shape, Box.whole(block.shape)),))


class Tied(nn.Module):
    """The matrix of a tied embedding, on the last of several pipeline stages: no token is looked up there."""

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self.weight = embed.weight


class Layer(nn.Module):
    """`x += mixer(norm(x)); x += mlp(norm(x))`: the block of all families."""

    def __init__(self, shape: Shape, mixer: nn.Module, mlp: nn.Module, at: str) -> None:
        super().__init__()
        self.norm = Norm(shape, at + "input_layernorm.weight")
        self.mixer = mixer
        self.mlp_norm = Norm(shape, at + "post_attention_layernorm.weight")
        self.mlp = mlp
        self.run: Callable[[Tensor, Rope, ops.Documents], Tensor] = self.block  # `parallel.recompute` may exchange it

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        return self.run(x_TD, rope, docs)

    def block(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        x_TD = x_TD + self.mixer(self.norm(x_TD), rope, docs)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class LanguageHead(nn.Module):
    """Final norm and vocabulary scores. `[T, V]` only exists in full when logits are asked for."""

    scores = ("logprobs", "entropy", "logits", "target_logits")

    def __init__(self, shape: Shape, at: str) -> None:
        super().__init__()
        self.norm = Norm(shape, at + "norm.weight")
        rows, cols = {"vocab": shape.vocab}, {"embed": shape.width}
        own = weight(rows, cols, key=LM_HEAD, init=Init("normal", shape.std))
        self.weight = None if shape.tied else own
        self.vocab = Span("vocab", shape.vocab)
        self.enter = Door(ENTER, shape.width)
        self.meet = Door(MEET, 3, floats=True)

    def forward(self, x_TD: Tensor, labels_T: Tensor, want: str, tied_VD: Tensor | None) -> tuple[Tensor, ...]:
        weight_VD = self.weight if tied_VD is None else tied_VD
        assert weight_VD is not None
        own_tokens, x_TD = x_TD.shape[0], self.enter(self.norm(x_TD))
        if want == "target_logits":  # before the product: a row is as wide as the vocabulary
            x_TD, want = x_TD[labels_T >= 0], "logits"
        if want == "logits":
            return (ops.upcast(ops.linear(x_TD, weight_VD)),)
        stats_T3 = ops.token_stats(x_TD, weight_VD, labels_T - self.vocab.start, entropy=want == "entropy")
        logprobs_T, entropy_T = ops.combine_stats(self.meet(stats_T3).view(-1, own_tokens, 3))
        return (logprobs_T, entropy_T) if want == "entropy" else (logprobs_T,)


class ValueHead(nn.Module):
    """One score a token and label, `[T, labels]`; `[T]` of one label. On this rank's own tokens, as the norm."""

    scores = ("values",)

    def __init__(self, shape: Shape, at: str) -> None:
        super().__init__()
        self.norm = Norm(shape, at + "norm.weight")
        labels, init = shape.labels, Init("normal", shape.std)
        rows, cols = {"label": labels.num}, {"embed": shape.width}
        self.weight = weight(rows, cols, key=SCORE, init=init, optional=labels.new)
        self.bias = weight(rows, key=SCORE_BIAS, decay=False, init=Init("zeros")) if labels.bias else None

    def forward(self, x_TD: Tensor, labels_T: Tensor, want: str, tied_VD: Tensor | None) -> tuple[Tensor, ...]:
        values_TL = ops.upcast(ops.linear(self.norm(x_TD), self.weight, self.bias))
        return (values_TL.squeeze(-1).clone(),)  # FSDP warns of views: a change in place would lose its hook


class NoHead(nn.Module):
    scores = ("hidden",)

    def __init__(self, shape: Shape, at: str) -> None:
        super().__init__()
        self.norm = Norm(shape, at + "norm.weight")

    def forward(self, x_TD: Tensor, labels_T: Tensor, want: str, tied_VD: Tensor | None) -> tuple[Tensor, ...]:
        return (self.norm(x_TD),)


HEAD_OF: dict[str, type[LanguageHead | ValueHead | NoHead]] = {"lm": LanguageHead, "value": ValueHead, "none": NoHead}


class Decoder(nn.Module):
    """A model. `forward` takes the whole packed stream of a data rank and returns scores of this rank's own tokens.

    What it returns depends on `want`: `(logprobs,)`, `(logprobs, entropy)` for "entropy", `(values,)`, `(hidden,)`.
    Only `(logits,)` are of all tokens, over this rank's part of the vocabulary; "target_logits" of those with a label.

    A pipeline stage is a decoder with some of the layers. All but the first are given `x_TD`, what the stage before
    made of this rank's tokens; all but the last have no head, and return what they made of them.
    """

    embed: Embedding | Tied | None
    head: LanguageHead | ValueHead | NoHead | None

    def __init__(
        self, shape: Shape, at: str, blocks: Sequence[Callable[[str], nn.Module]], head: str,
        balance: Balance | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if head not in HEAD_OF:
            raise ConfigError(f"head={head!r} is unknown; choose from {', '.join(HEAD_OF)}")
        self.shape = shape
        self.balance = balance or Balance()
        self.tied = shape.tied and head == "lm"
        self.tower: Tower | None = None
        self.embed = Embedding(shape, at)
        self.layers = nn.ModuleDict({str(i): block(f"{at}layers.{i}.") for i, block in enumerate(blocks)})
        self.head = HEAD_OF[head](shape, at)
        self.share = Door(SHARE, 0)
        belongs_to(self.embed, first=True)
        for number, layer in self.layers.items():
            belongs_to(layer, layer=int(number))
        self.scores = HEAD_OF[head].scores  # what a forward may be asked for

    def with_layers(self, numbers: Iterable[int]) -> Decoder:
        """The same, with these of its layers alone and without a tower: shared, not copied."""
        part = self.part(numbers, first=True, last=True)
        part.embed, part.head, part.tower = self.embed, self.head, None
        return part

    def part(self, layers: Iterable[int], *, first: bool, last: bool) -> Decoder:
        """A stage: some of the layers under their own numbers, so that names are those of the whole."""
        part = Decoder.__new__(Decoder)  # no copy: it would share the hooks that torch hangs on a module
        nn.Module.__init__(part)
        part.shape, part.balance, part.share = self.shape, self.balance, self.share
        part.tied, part.scores = self.tied, self.scores
        part.tower = self.tower if first else None
        tied = Tied(self.embed) if self.tied and isinstance(self.embed, Embedding) else None
        part.embed = self.embed if first else tied if last else None
        part.layers = nn.ModuleDict({str(number): self.layers[str(number)] for number in layers})
        part.head = self.head if last else None
        return part

    @property
    def vocabulary(self) -> str:
        """The parameter whose rows score the words; empty without such a head."""
        if not isinstance(self.head, LanguageHead):
            return ""
        return "embed.weight" if self.tied else "head.weight"

    def compute_in(self, dtype: torch.dtype) -> None:
        assert isinstance(self.embed, Embedding), "a whole model has one"
        self.embed.compute = dtype
        if self.tower is not None:
            self.tower.compute = dtype

    def units(self) -> list[nn.Module]:
        """What is gathered and freed together. A tied embedding stays with the root: two places use it."""
        ends = (None, None) if self.tied else (self.embed, self.head)
        tower = [] if self.tower is None else self.tower.units()
        return [unit for unit in (*tower, ends[0], *self.layers.values(), ends[1]) if unit is not None]

    def forward(
        self, tokens_T: Tensor, labels_T: Tensor, docs: ops.Documents, want: str, x_TD: Tensor | None = None,
        sight: VisionInput | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`sight`: the pictures of the first stage, where a rank has any."""
        rows: tuple[Tensor, ...] = ()  # of tokens in whose places pictures are: what they are, and what layers add
        if x_TD is None:
            assert self.embed is not None, "the first stage has it"
            tokens_T, none_T = self.share(tokens_T), None
            if sight is not None:
                assert self.tower is not None, "pictures without a tower were refused"
                rows, none_T, at_N = self.tower(sight), self.tower.is_place(tokens_T), sight.at_N
            x_TD = self.embed(tokens_T, none_T)
        dtype, turns = ops.upcast(x_TD[:0]).dtype, docs.positions_T if docs.turns_T3 is None else docs.turns_T3
        rope = ops.rope_tables(self.share(turns), self.shape.rotary, dtype, self.shape.sections)

        def with_rows(x_TD: Tensor, number: int) -> Tensor:
            return x_TD.index_add(0, at_N, rows[number]) if number < len(rows) else x_TD

        x_TD = with_rows(x_TD, 0)
        for number, layer in enumerate(self.layers.values(), 1):
            x_TD = with_rows(layer(x_TD, rope, docs), number)
        if self.head is None:
            return (x_TD,)
        tied_VD = self.embed.weight if self.tied and self.embed is not None else None
        return tuple(self.head(x_TD, self.share(labels_T), want, tied_VD))
