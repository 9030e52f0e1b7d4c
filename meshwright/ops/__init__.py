"""Mathematics of the models as pure functions on one device: attention, delta rule, experts, norms, RoPE, loss.

No function knows of modules, meshes or files. Each function

- works in the dtype of its activations, casts parameters to it, and accumulates in at least float32;
- never synchronises with the device, unless its docstring says so;
- gives every parameter that it receives a gradient (zeros rather than None), because a rank without one would not join
  the reduction of the others;
- chooses its own kernel: no caller knows which one runs.

Each has a slow and obvious reference in `tests/ops/references.py`. The suffix of a name spells the shape of a tensor:
`x_TD` is [tokens, model width], `q_THK` is [tokens, query heads, head dim].
"""

from .attention import attention
from .chosen_blocks import Choice, TokenBlocks, block_attention, block_keys, blocks_of, choose_blocks
from .deferred_weight_grads import Jobs, deferring_weight_grads
from .delta import causal_conv, delta_rule, gates
from .documents import WHOLE, Documents, Parts, documents, has_next, next_in_document
from .experts import LowRank, experts, route
from .fp8_storage import FrozenWeight, Grid, Weight
from .fp8_tensor import Blocks, Fp8, Quantised
from .host_memory import to_device
from .kernels import uncompiled
from .loss import (
    Candidates,
    candidate_stats,
    combine_candidate_stats,
    combine_stats,
    combine_top_k,
    is_likeliest,
    token_stats,
    top_k,
)
from .matmul import linear, linears
from .meta_kernels import planned_for, to_host
from .ngrams import NgramHash, ngram_rows
from .norms import gated_rms_norm, layer_norm, rms_norm, swiglu, upcast
from .replayed_choices import Choices, replayed
from .rope import LinearScaling, Llama3Scaling, Rotary, YarnScaling, rope_tables, rotate
from .rows import (
    Copies,
    Rows,
    by_expert,
    concat,
    copies_of,
    count_values,
    gather_copies,
    lookup,
    reordered,
    runs,
    sum_copies,
    turns,
)
from .streams import StreamGates, grouped_rms_norm, read_streams, write_streams
from .vision_frames import MERGED, Frames, frame_tables, frames, interpolated
