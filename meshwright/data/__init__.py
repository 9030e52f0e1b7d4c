"""Data for supervised fine-tuning and pre-training: rows of files -> chats and texts -> tokens -> packed batches.

A row passes through these modules: `row_files` reads it, `chat` or `texts` tokenises it into documents, `token_cache`
stores them, `packing_plan` assigns documents to streams, `feed` makes batches of streams. `pack` makes a batch from
lists.
"""

from .batch import IGNORE, NO_EXPERT, Batch
from .chat import Chat, ChatOptions, Request, message_of_answer, stop_ids_of
from .feed import SOURCE, Feed, batch_of, source_of
from .field_values import OverTokens, over_tokens
from .hf_datasets import Part, fetched_files, is_saved, saved_files
from .images import PLACEHOLDERS, Frame, ImagePatches, Images
from .labelled import Labelled, WholeText
from .pack import cut, filled, joined_batches, pack
from .pack_checks import WEIGHT, check_shifted
from .packing_plan import DataSource, Plan
from .preferences import ChatPairs, TextPairs
from .processor import ImageLimits, Placeholders, Processor
from .retrieval import EmbeddingRows, RerankRows
from .row_files import SUFFIXES, files_of
from .texts import Ready, TextOnly, Texts
from .token_cache import BEGAN, RUN_BEGAN, Documents, Make, TokenizeSpec, Unused, prepare
from .tokenizer import encoded, fingerprint_of, generation_config_of, template_of, tokenizer_of
from .tokens import Tokens, scored, together
from .vision_files import View
