"""Hugging Face directories in and out, by intersection of boxes."""

from .directory import Export, check_export, exported_config, raw_tensor, write_directory
from .header import DTYPES, Entry, read_stamped_json
from .hub import download, is_hub_id, local_directory
from .init import fill_fresh
from .keymap import Key, KeyMap, blocks_by_key, of_source, of_table
from .load import Choice, Reader, carried_keys, check_keys, choose, chosen
from .read_plan import Read, fill, load_bill, plan_reads
from .source import CONFIG, Source, exists, open_index, open_source, path_of, read_config, read_stamped_config
from .streaming import StoredModel, whole_tensors
