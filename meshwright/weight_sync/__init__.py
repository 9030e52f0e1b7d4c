"""Carry weights from a training engine to processes outside of its mesh, and receive them there.

A stream is an iterator of (name, tensor), such as `mw.stream` yields. Two carriers: any process group that contains the
sender and its receivers (`send_to_group`), and shared memory between processes of one host (`send_to_process`). The
third is a directory: `mw.export`, which appears whole or not at all. Receivers need no mesh and no model.
"""

from .deltas import apply_delta
from .group import receive_from_group, send_to_group
from .process import receive_from_process, send_to_process
from .specs import TensorSpec
