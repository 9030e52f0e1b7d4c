"""Documents -> packed batches."""

from .arguments import WEIGHT, check_shifted
from .batch import IGNORE, Batch
from .chat import Chat, ChatOptions, stop_ids_of
from .feed import SOURCE, Feed, batch_of, source_of
from .hub import Part, fetched_files, is_saved, saved_files
from .images import PLACEHOLDERS, Frame, Images, Picture
from .pack import cut, filled, joined_batches, pack, shift
from .plan import DataSource, Plan
from .processor import Marks, Processor, Wishes
from .reading import SUFFIXES, files_of
from .store import BEGAN, RUN_BEGAN, Documents, Make, Recipe, Unused, prepare
from .texts import Ready, Texts, Unseeing
from .tokenizer import fingerprint_of, generation_config_of, template_of, tokenizer_of
from .tokens import Tokens
