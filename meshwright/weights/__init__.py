"""Read and write Hugging Face model directories (safetensors, config.json, index) for sharded models.

A parameter and a tensor of a file are both boxes of elements. Loading and exporting intersect them and turn the common
boxes into byte ranges, so each rank reads and writes only what it stores, for any mesh. No rank builds the whole model
and no collective distributes it: loaders that do so need the model's size on every host (ms-swift#9980) or hang in an
implicit redistribute when ranks differ (VeOmni#642).
"""

from .checksums import Checks, Extent, Extents, checksum, extents_of_json
from .deltas import Change, move, send_changes, snapshot_of
from .directory import (
    Export,
    check_constants,
    check_export,
    copy_carried,
    exported_config,
    first_bytes,
    raw_tensor,
    whole_values,
    write_directory,
    write_small,
)
from .file_version import opened
from .frozen_scales import Values, check_same, grid_of, rows_of
from .hub import download, is_hub_id, local_directory
from .keymap import ADAPTERS, Key, KeyMap, blocks_by_key, keys_of, of_source, of_table, widest
from .merged import Delta, MergedValues
from .output_dir import Target, atomic_directory, check_target, check_writable, to_disk
from .quant_formats import as_in_file
from .random_init import fill_fresh
from .read_plan import Read, fill, load_bill, plan_reads
from .reader import Choice, Reader, carried_keys, check_keys, choose, chosen
from .requantise import check_scaled, quantised_keys, quantised_tensors
from .safetensors_header import DTYPES, NAMES, TRAINABLE, Entry, read_header, read_json, read_stamped_json, short
from .shards import ShardSpec, shards
from .small_files import MANIFEST, MODULES, TRAINER, SmallFiles, read_small
from .source import CONFIG, Source, exists, open_index, open_source, path_of, read_config, read_stamped_config
from .streaming import StoredModel, buckets, dtypes_of, whole_tensors
from .writer import Files, make_files, whole_rows
