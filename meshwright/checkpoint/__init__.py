"""Sharded, atomic, asynchronous checkpoints: a Hugging Face model directory with optimizer state and a
resume point.


A checkpoint of N ranks loads on M ranks of any layout, because every state set (weights, float32 masters, each tensor
of optimizer state) is spelled with the global key names and shapes of the model's files. Formats that store local names
or flat shards restore wrong layers after a change of pipeline stages (Megatron-LM#7452), or scramble fused SwiGLU
weights after a change of shards (Megatron-LM#2769).
"""

from .async_save import SaveJob
from .content import MASTER, PARAMETERS, RANDOM, WEIGHTS, Content, Keep, StateSet, planes_of, random_plane, with_zeros
from .copy import copy_checkpoint, is_url
from .dcp import TORCH_LIST, Sharded, TorchFiles, sharded, take, write_torch_files
from .folder import (
    CHECKPOINTS,
    RUN,
    Draft,
    checkpoints,
    final_place,
    is_checkpoint,
    newest_of,
    newest_whole,
    remove_later,
    run_of,
)
from .inspect import check_bytes, differences, opened_at, summary
from .manifest import PARTS, write_part
from .restore import (
    Checkpoint,
    RestoreTarget,
    check_frozen,
    extents_of_model,
    is_named,
    open_newest,
    pass_over,
    restore,
    together,
)
from .save import commit, save, write_beside
