"""Sync weights from a trainer to inference processes outside its mesh, by broadcast or shared memory.

A stream is an iterator of (name, tensor), such as `mw.stream` yields. `send_to_group` sends it over any process group
that contains the sender and its receivers, and `send_to_process` through shared memory between processes of one host.
Receivers need no mesh and no model. The third way is a directory of `mw.export`, which appears whole or not at all.
"""

from .deltas import apply_delta
from .group import receive_from_group, send_to_group
from .process import receive_from_process, send_to_process
from .specs import TensorSpec
