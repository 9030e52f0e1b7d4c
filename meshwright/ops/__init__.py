"""Pure functions on one device: the mathematics of the models, with no idea of modules, meshes or files.

They work in the dtype of the activations they are given, to which they bring parameters, compute in at least float32
inside, never wait for the device (where one must, its docstring says so), and give
every parameter that they receive a gradient. Which kernel runs is chosen here and nowhere else. Each has a slow and
obvious reference in `tests/ops/references.py`.
"""

from meshwright.ops.attention import attention
from meshwright.ops.copies import Copies, copied, copies_of, runs, summed, turns
from meshwright.ops.delta import causal_conv, delta_rule, gates
from meshwright.ops.documents import WHOLE, Documents, Parts, documents
from meshwright.ops.experts import experts, route
from meshwright.ops.frames import MERGED, Frames, frame_tables, frames, resampled
from meshwright.ops.kernels import uncompiled
from meshwright.ops.late import Jobs, weights_late
from meshwright.ops.lookup import lookup, reordered
from meshwright.ops.loss import combine_stats, token_stats
from meshwright.ops.norms import gated_rms_norm, layer_norm, rms_norm, swiglu, upcast
from meshwright.ops.numbers import Grid, Numbers, Weight
from meshwright.ops.once import Choices
from meshwright.ops.planned import on_host, planned_for
from meshwright.ops.product import linear, linears
from meshwright.ops.quantised import Quantised
from meshwright.ops.rope import LinearScaling, Llama3Scaling, Rotary, YarnScaling, rope_tables, rotate
from meshwright.ops.routes import Rows, by_expert, counted, joined
from meshwright.ops.sending import sent
