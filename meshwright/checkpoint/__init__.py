"""Checkpoints: Hugging Face directories with all that training needs beside the weights, whole or not there at all."""

from .background import Saving
from .content import Content, Keep, random_plane
from .folder import CHECKPOINTS, RUN, Draft, checkpoints, final_place, is_checkpoint, newest_of, newest_whole, run_of
from .look import check_bytes, differences, opened_at, summary
from .manifest import write_part
from .planes import FIRST, MASTER, SECOND, WEIGHTS, Plane, planes_of, with_zeros
from .restore import Checkpoint, Wanted, check_frozen, open_newest, pass_over, raise_together, restore, runs_of_model
from .save import commit, save, write_beside
from .sharded import Sharded, sharded, take
from .store import copy_checkpoint, is_url
from .torch_files import TORCH_LIST, TorchFiles, write_torch_files
