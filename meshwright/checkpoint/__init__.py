"""Checkpoints: Hugging Face directories with all that training needs beside the weights, whole or not there at all."""

from .async_save import Saving
from .content import MASTER, PARAMETERS, RANDOM, WEIGHTS, Content, Keep, Plane, planes_of, random_plane, with_zeros
from .copy import copy_checkpoint, is_url
from .dcp import TORCH_LIST, Sharded, TorchFiles, sharded, take, write_torch_files
from .folder import CHECKPOINTS, RUN, Draft, checkpoints, final_place, is_checkpoint, newest_of, newest_whole, run_of
from .inspect import check_bytes, differences, opened_at, summary
from .manifest import PARTS, write_part
from .restore import Checkpoint, Wanted, check_frozen, open_newest, pass_over, raise_together, restore, runs_of_model
from .save import commit, save, write_beside
