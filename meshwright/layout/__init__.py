"""What every parameter is, how it is cut, and which doors activations pass. Pure data, no process group."""

from .bill import Charge, Pictures, Work, bill, gathered_bytes, padded
from .boxes import Box, check_tiling, chunk, interval
from .coded import check_coded, coded_of, with_scales
from .deals import check_context, deals, ways
from .doors import (
    DELTA,
    ENTER,
    LEAVE,
    MEET,
    SHARE,
    Coming,
    Context,
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
from .extremes import extreme_ranks
from .flow import begins_in, in_order, part_of, passed
from .fp8 import SCALES, check_fp8, gathered_low
from .frames import Placed, Route, route, share
from .hops import CODES, COUNTS, ROWS, WEIGHTS, Hop, divides, hops, likely_rows
from .line import Line, balanced, even
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
    Traffic,
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
from .schedule import ORDERS, Action, Transfer, forwards, program
from .stages import (
    LATE,
    Pipeline,
    Stage,
    costs_of_stages,
    forward_program,
    program_of,
    stages_of_param,
    trained_from,
    transfer_name,
)
from .storage import GATHERED, GRADIENTS, HELD, ON_THEIR_WAY, Held, Stored, Widths, narrow_bytes, storage
from .timetable import Gathers, Slot, Timetable, draw, gathers, most_kept, times
from .units import TOWER, Unit, units_of
