"""What every parameter is, how it is cut, and which doors activations pass. Pure data, no process group."""

from .backward_reach import begins_in, in_order, part_of, passed
from .bill import Charge, Pictures, Work, bill, gathered_bytes, padded
from .boxes import Box, check_tiling, chunk, interval
from .context_split import check_context, deals, ways
from .doors import (
    DELTA,
    ENTER,
    LEAVE,
    MEET,
    SHARE,
    Coming,
    Deal,
    Dispatch,
    Door,
    Insert,
    Join,
    Kind,
    Span,
    Swap,
    ToExperts,
    find,
    is_run,
)
from .expert_routes import CODES, COUNTS, ROWS, WEIGHTS, Hop, divides, hops, likely_rows
from .fp8_blocks import SCALES, check_fp8, gathered_low
from .fsdp_units import TOWER, Unit, units_of
from .int8_blocks import check_coded, coded_of, with_scales
from .params import (
    Block,
    Declared,
    Init,
    Layout,
    Param,
    Table,
    as_it_lies,
    belongs_to,
    collect,
    matrix_shape,
    plain,
    segments,
    weight,
)
from .rules import (
    Piece,
    Placement,
    Rules,
    ShardingSpec,
    across,
    axes_left_to_sum,
    check_written,
    cut,
    holders,
    owned,
    piece,
    pieces,
    place,
    summed_by_fsdp,
    written,
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
    ON_THEIR_WAY,
    Held,
    Stored,
    Widths,
    extreme_ranks,
    narrow_bytes,
    storage,
)
from .timetable import Gathers, Slot, Timetable, draw, gathers, most_kept, times
from .vision_balance import Placed, Route, route, share
