"""The drawing: what every parameter is, how it is cut, which doors activations pass. Pure data, no process group."""

from .bill import Charge, Step, Unit, bill, units_of
from .boxes import Box, check_tiling, chunk, interval
from .doors import ENTER, LEAVE, MEET, Dispatch, Door, Kind, Span, attributes
from .params import Block, Declared, Init, Layout, Param, Table, collect, matrix_shape, plain, segments, weight
from .rules import Piece, Placement, Rules, cut, missing, owns, piece, pieces, place, summed_by_fsdp
from .storage import Stored, Widths, storage

__all__ = [
    "ENTER",
    "LEAVE",
    "MEET",
    "Block",
    "Box",
    "Charge",
    "Declared",
    "Dispatch",
    "Door",
    "Init",
    "Kind",
    "Layout",
    "Param",
    "Piece",
    "Placement",
    "Rules",
    "Span",
    "Step",
    "Stored",
    "Table",
    "Unit",
    "Widths",
    "attributes",
    "bill",
    "check_tiling",
    "chunk",
    "collect",
    "cut",
    "interval",
    "matrix_shape",
    "missing",
    "owns",
    "piece",
    "pieces",
    "place",
    "plain",
    "segments",
    "storage",
    "summed_by_fsdp",
    "units_of",
    "weight",
]
