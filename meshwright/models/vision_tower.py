"""The vision tower of Qwen3-VL and Qwen3.5: a ViT that turns patches of images and videos into rows for the text model.

A frame is an image, or a time slice of a video. Attention stays within a frame, and 2 x 2 patches become one row. Each
row replaces the embedding of one placeholder token. A rank runs whole frames with whole weights. One door (a declared
all-to-all) then sends each row to the rank that holds its token.

Shapes: P patches, N rows, E width of the tower, H heads, K head dim, C pixels of a patch, D width of the text model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import Block, Box, Init, Layout, ScatterVision, belongs_to, weight
from .hf_config import Json, divides, group, listed, refuse, take
from .linear import WideLinear

_EPS = 1e-6  # epsilon of its norms; the config's rms_norm_eps is that of the text model
_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("gelu_pytorch_tanh",), "in_channels": (3,), "spatial_merge_size": (ops.MERGED,),
    "temporal_patch_size": (2,),
}  # fmt: skip
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pixels:
    """The pixels of a patch: channels, frames in time, rows and columns."""

    chan: int = 3
    time: int = 2
    side: int = 16

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.chan, self.time, self.side, self.side

    @property
    def num(self) -> int:
        return self.chan * self.time * self.side * self.side


@dataclass(frozen=True)
class TowerShape:
    """The shape of a tower.

    `taps`: the blocks whose features the first layers of the text model also receive (deepstack, 2406.04334).
    """

    width: int
    depth: int
    heads: int
    ffn: int
    places: int  # entries of the position table, which is square
    theta: float
    std: float
    pixels: Pixels
    taps: tuple[int, ...] = ()

    @property
    def head(self) -> int:
        return self.width // self.heads

    def cost(self, num: int) -> float:
        """Return the multiply-adds of one block for a frame of `num` patches: its matmuls, and full attention."""
        return num * (4.0 * self.width**2 + 2 * self.width * self.ffn + 2 * num * self.width)


@dataclass(frozen=True, eq=False)  # the generated __eq__ would raise: a tensor comparison has no single truth value
class VisionInput:
    """The work of a rank on the images of a micro-batch.

    `patches_PC`, `frames`: the patches and frames that this rank runs. `sent`, `got`: how many rows it sends to, and
    gets from, each rank that reads the same batch. `at_N`: the indices of the tokens that received rows replace.
    """

    patches_PC: Tensor
    frames: ops.Frames
    sent: list[int]
    got: list[int]
    at_N: Tensor


def tower_shape_of(config: Json, width: int, layers: int) -> TowerShape:
    """Read the shape of the tower from the whole config of a vision model. `width`, `layers`: those of the text
    model."""
    vision = group(config, "vision_config")
    refuse(vision, _FIXED)
    num_heads = take(vision, "num_heads", int, take(vision, "num_attention_heads", int, 16))
    shape = TowerShape(
        width=take(vision, "hidden_size", int, 1152), ffn=take(vision, "intermediate_size", int, 4304),
        depth=take(vision, "depth", int, take(vision, "num_hidden_layers", int, 27)), heads=num_heads,
        places=take(vision, "num_position_embeddings", int, 2304), theta=_theta(vision),
        std=take(vision, "initializer_range", float, 0.02), pixels=Pixels(side=patch_of(config)),
        taps=_taps(config, vision),
    )  # fmt: skip
    if divides("num_heads", num_heads, "hidden_size", shape.width) % 4:
        raise ConfigError(f"config.json: a head of the tower has {shape.head} dims; it must be a multiple of 4")
    if round(shape.places**0.5) ** 2 != shape.places:
        raise ConfigError(f"config.json: num_position_embeddings={shape.places} is not a square number; correct it")
    out = take(vision, "out_hidden_size", int, 3584)
    if out != width:
        raise ConfigError(f"config.json: out_hidden_size={out} of the tower, but hidden_size={width} of the text")
    taps = list(shape.taps)
    if any(not 0 <= tap < shape.depth for tap in taps) or taps != sorted({*taps}) or len(taps) > layers:
        raise ConfigError(
            f"config.json: deepstack_visual_indexes={taps} must increase, between 0 and depth={shape.depth}; there can "
            f"be at most {layers} of them, one for each layer of the text"
        )
    return shape


def patch_of(config: Json) -> int:
    """Return the side of a patch in pixels."""
    return take(group(config, "vision_config"), "patch_size", int, 16)


def _theta(vision: Json) -> float:
    """Return the RoPE base of the tower."""
    fields = group(vision, "rope_parameters")
    refuse(fields, {"rope_type": ("axial", "default")})
    return float(take(fields, "rope_theta", float, 10000.0))


def _taps(config: Json, vision: Json) -> tuple[int, ...]:
    """Return the deepstack blocks of Qwen3-VL; Qwen3.5 has none."""
    if not str(config.get("model_type")).startswith("qwen3_vl"):
        refuse(vision, {"deepstack_visual_indexes": ([],)})
        return ()
    absent = vision.get("deepstack_visual_indexes") is None
    return (8, 16, 24) if absent else tuple(listed(vision, "deepstack_visual_indexes", int))


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias."""

    def __init__(self, rows: dict[str, int], key: str) -> None:
        super().__init__()
        self.weight = weight(rows, key=f"{key}.weight", decay=False, init=Init("ones"))
        self.bias = weight(rows, key=f"{key}.bias", decay=False, init=Init("zeros"))

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, _EPS)


class Patches(nn.Module):
    """Embed pixels linearly and add a position embedding, interpolated to the size of each frame.

    Files spell the embedding as a convolution whose kernel equals its stride, which is a matmul on patches.
    """

    def __init__(self, shape: TowerShape, at: str) -> None:
        super().__init__()
        E, sizes, key = shape.width, shape.pixels.sizes, at + "patch_embed.proj"
        whole = Box.whole((E, *sizes))
        spelled = Layout("convolution", (Block(whole, f"{key}.weight", (E, *sizes), whole),))
        names = ("chan", "time", "patch_row", "patch_col")
        init = Init("normal", shape.std)
        self.weight = weight({"eye": E}, dict(zip(names, sizes, strict=True)), layouts=[spelled], init=init)
        self.bias = weight({"eye": E}, key=f"{key}.bias", decay=False, init=Init("zeros"))
        self.grid = weight({"place": shape.places}, {"eye": E}, key=at + "pos_embed.weight", init=init)

    def forward(self, patches_PC: Tensor, frames: ops.Frames) -> Tensor:
        x_PE = ops.linear(patches_PC, self.weight, self.bias)
        return x_PE + ops.interpolated(self.grid, frames, x_PE)


class TowerBlock(nn.Module):
    """A ViT block: `x += attention(norm(x)); x += mlp(norm(x))`.

    A patch attends to its own frame, in both directions.
    """

    def __init__(self, shape: TowerShape, at: str) -> None:
        super().__init__()
        E, H, K = shape.width, shape.heads, shape.head
        self.heads, self.head = H, K
        self.norm = LayerNorm({"eye": E}, at + "norm1")
        # tp does not cut the tower, because ranks divide its frames instead. So no sharding rule knows these names of
        # dims.
        qkv, wide = {"part": 3, "eye_heads": H, "eye_head": K}, {"eye_ffn": shape.ffn}
        joined = WideLinear(qkv, {"eye": E}, shape.std, key=at + "attn.qkv", bias=True)
        self.qkv = joined.of_matrices(part=(1, 1, 1))
        self.proj = WideLinear({"eye": E}, {"eye_heads": H, "eye_head": K}, shape.std, key=at + "attn.proj", bias=True)
        self.mlp_norm = LayerNorm({"eye": E}, at + "norm2")
        self.fc1 = WideLinear(wide, {"eye": E}, shape.std, key=at + "mlp.linear_fc1", bias=True)
        self.fc2 = WideLinear({"eye": E}, wide, shape.std, key=at + "mlp.linear_fc2", bias=True)
        self.run: Callable[[Tensor, Tables, ops.Documents], Tensor] = self.block  # `parallel.recompute` may replace it

    def forward(self, x_PE: Tensor, tables: Tables, docs: ops.Documents) -> Tensor:
        return self.run(x_PE, tables, docs)

    def block(self, x_PE: Tensor, tables: Tables, docs: ops.Documents) -> Tensor:
        """Run the block itself, without checkpointing or compilation."""
        q_PHK, k_PHK, v_PHK = self.qkv(self.norm(x_PE)).view(-1, 3, self.heads, self.head).unbind(1)
        q_PHK, k_PHK = ops.rotate(q_PHK, *tables), ops.rotate(k_PHK, *tables)
        x_PE = x_PE + self.proj(ops.attention(q_PHK, k_PHK, v_PHK, docs, causal=False).flatten(1))
        return x_PE + self.fc2(F.gelu(self.fc1(self.mlp_norm(x_PE)), approximate="tanh"))


class Merger(nn.Module):
    """Merge 2 x 2 neighbouring patches into one row of the text's width.

    Its GELU is the exact one, whatever the config says. `late`: concatenate the four patches before the norm, as the
    deepstack mergers do (`use_postshuffle_norm` in transformers).
    """

    def __init__(self, shape: TowerShape, width: int, at: str, *, late: bool = False) -> None:
        super().__init__()
        four, self.late = ops.MERGED**2 * shape.width, late
        self.norm = LayerNorm({"four_eye": four} if late else {"eye": shape.width}, at + "norm")
        self.fc1 = WideLinear({"four_eye_out": four}, {"four_eye": four}, shape.std, key=at + "linear_fc1", bias=True)
        self.fc2 = WideLinear({"embed": width}, {"four_eye": four}, shape.std, key=at + "linear_fc2", bias=True)

    def forward(self, x_PE: Tensor) -> Tensor:
        four = ops.MERGED**2 * x_PE.shape[1]
        x_NF = self.norm(x_PE.view(-1, four)) if self.late else self.norm(x_PE).view(-1, four)
        return self.fc2(F.gelu(self.fc1(x_NF)))


class Tower(nn.Module):
    """The whole vision tower: patch embedding, blocks, mergers, and the door to the text model."""

    def __init__(self, shape: TowerShape, width: int, ids: Sequence[int], at: str) -> None:
        super().__init__()
        self.shape, self.ids, self.compute = shape, tuple(ids), torch.float32
        self.patches = Patches(shape, at)
        self.blocks = nn.ModuleDict({str(i): TowerBlock(shape, f"{at}blocks.{i}.") for i in range(shape.depth)})
        self.merger = Merger(shape, width, at + "merger.")
        deep = [Merger(shape, width, f"{at}deepstack_merger_list.{n}.", late=True) for n in range(len(shape.taps))]
        self.deep = nn.ModuleDict({str(n): merger for n, merger in enumerate(deep)})
        # Rows for the embedding and for all deepstack layers travel side by side: one all-to-all per micro-batch.
        self.insert = ScatterVision(width * (1 + len(deep)), shape.cost)
        belongs_to(self, first=True)

    def units(self) -> list[nn.Module]:
        """Return the FSDP units in forward order, which also determines the order of prefetching in backward."""
        units: list[nn.Module] = [self.patches]
        for number, block in self.blocks.items():
            taps = [self.shape.taps.index(int(number))] if int(number) in self.shape.taps else []
            units += [block, *(self.deep[str(n)] for n in taps)]
        return [*units, self.merger]

    def is_place(self, tokens_T: Tensor) -> Tensor:
        """Return which tokens stand for a part of an image."""
        return torch.isin(tokens_T, tokens_T.new_tensor(self.ids))

    def forward(self, sight: VisionInput) -> tuple[Tensor, ...]:
        """Run frames; return rows for the placeholders among this rank's tokens.

        The first result replaces the embeddings of the placeholders. The n-th further result is added to the output of
        the n-th text layer at these tokens (deepstack).
        """
        x_PE = self.patches(sight.patches_PC.to(self.compute), sight.frames)
        tables = ops.frame_tables(sight.frames, self.shape.head, self.shape.theta, ops.upcast(x_PE[:0]).dtype)
        deep_rows: list[Tensor] = []
        for number, block in self.blocks.items():
            x_PE = block(x_PE, tables, sight.frames.docs)
            if int(number) in self.shape.taps:
                deep_rows.append(self.deep[str(len(deep_rows))](x_PE))
        rows_ND = torch.cat([self.merger(x_PE), *deep_rows], -1)
        return self.insert(rows_ND, sight.sent, sight.got).chunk(1 + len(deep_rows), -1)
