"""Hugging Face directories in and out, by intersection of boxes."""

from .deliver import Delivery, deliveries, fill, load_bill
from .directory import exported_config, raw_tensor, write_directory
from .header import DTYPES, Entry
from .hub import download, is_hub_id, local_directory
from .init import fill_fresh
from .load import Choice, Reader, carried_keys, check_keys, choose, chosen
from .source import Source, looked_at, open_index, open_source, path_of, read_config
from .spelling import Key, Spelling, blocks_by_key, of_source, of_table
from .streaming import Holding, whole_tensors

__all__ = [
    "DTYPES",
    "Choice",
    "Delivery",
    "Entry",
    "Holding",
    "Key",
    "Reader",
    "Source",
    "Spelling",
    "blocks_by_key",
    "carried_keys",
    "check_keys",
    "choose",
    "chosen",
    "deliveries",
    "download",
    "exported_config",
    "fill",
    "fill_fresh",
    "is_hub_id",
    "load_bill",
    "local_directory",
    "looked_at",
    "of_source",
    "of_table",
    "open_index",
    "open_source",
    "path_of",
    "raw_tensor",
    "read_config",
    "whole_tensors",
    "write_directory",
]
