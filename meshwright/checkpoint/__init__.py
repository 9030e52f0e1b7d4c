"""Checkpoints: Hugging Face directories with all that training needs beside the weights, whole or not there at all."""

from .async_save import SaveJob
from .content import FIRST, MASTER, SECOND, WEIGHTS, Content, Keep, StateSet, planes_of, random_plane, with_zeros
from .copy import copy_checkpoint, is_url
from .dcp import TORCH_LIST, Sharded, TorchFiles, sharded, take, write_torch_files
from .folder import CHECKPOINTS, RUN, Draft, checkpoints, final_place, is_checkpoint, newest_of, newest_whole, run_of
from .inspect import check_bytes, differences, opened_at, summary
from .manifest import write_part
from .restore import (
    Checkpoint,
    RestoreTarget,
    check_frozen,
    extents_of_model,
    open_newest,
    pass_over,
    raise_together,
    restore,
)
from .save import commit, save, write_beside
