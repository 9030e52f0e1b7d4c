"""Checkpoints: Hugging Face directories with all that training needs beside the weights, whole or not there at all."""

from .background import Saving
from .content import Content, Keep
from .folder import final_place, find, newest_whole
from .look import check_bytes, differences, opened_at, summary
from .planes import FIRST, MASTER, SECOND, WEIGHTS, planes_of, with_zeros
from .restore import Checkpoint, open_checkpoint, restore
from .save import save
from .sharded import Sharded, sharded, take
