"""Sharding: what each parameter is, which rank holds which part, which collectives a step needs. Pure data.

No process group is needed, so the same code answers for any rank of any mesh, on a laptop: loading, checkpoints,
the bill of a step, plans and `verify` all read it. Modules declare parameters (params.py) and communication (doors.py);
`Rules` and an `Axes` turn declarations into pieces (rules.py); bill.py and stored_bytes.py add up what they cost.
"""

from .backward_reach import begins_in, in_order, part_of, passed
from .bill import Charge, ImageFrames, Work, bill, gathered_bytes, padded
from .boxes import Box, check_tiling, chunk, interval
from .context_split import check_context, head_splits, ways
from .doors import (
    ATTENTION,
    DELTA,
    ENTER,
    LEAVE,
    MEET,
    OWN,
    SHARE,
    SPARSE,
    Dispatch,
    Door,
    DoorKind,
    Halo,
    HeadSplit,
    Join,
    Lookup,
    PendingRows,
    ScatterVision,
    Span,
    StartDispatch,
    Swap,
    find_doors,
    is_run,
    look_up,
)
from .expert_routes import CODES, COUNTS, ROWS, WEIGHTS, Hop, divides, expected_rows, hops
from .fp8_blocks import SCALES, SEPARATE, check_fp8, gathered_in_fp8, quantised_once
from .fsdp_units import MTP, TOWER, Unit, units_of
from .matrix_owners import (
    TO_HOLDERS,
    TO_OWNERS,
    Bucket,
    Exchange,
    MatrixPart,
    MatrixPlan,
    exchanged,
)
from .params import (
    ALWAYS,
    IF_NAMED,
    NEVER,
    Block,
    Constants,
    Declared,
    Init,
    Layout,
    Param,
    Table,
    belongs_to,
    collect,
    matrix_shape,
    plain,
    segments,
    storage_order,
    weight,
)
from .rules import (
    Piece,
    Placement,
    Rules,
    ShardingSpec,
    axes_left_to_sum,
    check_rows_to_write,
    column_axes,
    consecutive_columns,
    cut,
    holders,
    local_sizes,
    owned,
    piece,
    pieces,
    place,
    rows_to_write,
    shape_before_fsdp,
    summed_by_fsdp,
    tp_sizes,
)
from .schedules import ORDERS, Action, Transfer, forwards, program
from .stage_map import Line, balanced, even
from .stages import (
    Stage,
    costs_of_stages,
    forward_program,
    program_of,
    stages_of_param,
    trained_from,
    transfer_name,
)
from .stored_bytes import (
    GATHERED,
    GRADIENTS,
    HELD,
    IN_FLIGHT,
    QUANTISED,
    STATE,
    Held,
    StateBytes,
    Stored,
    Widths,
    extreme_ranks,
    narrow_bytes,
    storage,
)
from .timetable import Gathers, Slot, Timetable, draw, gathers, peak_kept, times
from .vision_balance import Placed, Route, balance_frames, route
