"""Pure functions on one device: the mathematics of the models, with no idea of modules, meshes or files.

They work in the dtype of the activations they are given, to which they bring parameters, compute in at least float32
inside, never wait for the device (where one must, its docstring says so), and give
every parameter that they receive a gradient. Which kernel runs is chosen here and nowhere else. Each has a slow and
obvious reference in `tests/ops/references.py`.
"""

from .attention import attention
from .deferred_weight_grads import Jobs, weights_late
from .delta import causal_conv, delta_rule, gates
from .documents import WHOLE, Documents, Parts, documents
from .experts import experts, route
from .fp8_storage import Grid, Numbers, Weight
from .fp8_tensor import Quantised
from .host_memory import sent
from .kernels import uncompiled
from .loss import combine_stats, token_stats
from .matmul import linear, linears
from .meta_kernels import on_host, planned_for
from .norms import gated_rms_norm, layer_norm, rms_norm, swiglu, upcast
from .replayed_choices import Choices
from .rope import LinearScaling, Llama3Scaling, Rotary, YarnScaling, rope_tables, rotate
from .rows import Copies, Rows, by_expert, copied, copies_of, counted, joined, lookup, reordered, runs, summed, turns
from .vision_frames import MERGED, Frames, frame_tables, frames, resampled
