"""Hugging Face directories in and out, by intersection of boxes."""

from .directory import (
    Export,
    check_export,
    copy_carried,
    exported_config,
    interrupted_later,
    raw_tensor,
    whole_values,
    write_directory,
    write_small,
)
from .grids import Values, check_same, grid_of, rows_of
from .header import DTYPES, NAMES, TRAINABLE, Entry, read_header, read_json, read_stamped_json, short
from .hub import download, is_hub_id, local_directory
from .init import fill_fresh
from .keymap import Key, KeyMap, blocks_by_key, keys_of, of_source, of_table, widest
from .load import Choice, Reader, carried_keys, check_keys, choose, chosen
from .read_plan import Read, fill, load_bill, plan_reads
from .rescale import check_scaled, numbers_and_scales
from .rows import whole_rows
from .runs import Checks, Run, Runs, checksum, runs_of_json
from .scales import BYTES
from .small import MANIFEST, TRAINER, SmallFiles, read_small
from .source import CONFIG, Source, exists, open_index, open_source, path_of, read_config, read_stamped_config
from .stamp import opened
from .streaming import StoredModel, whole_tensors
from .target import Target, atomic_directory
from .writing import Files, make_files
