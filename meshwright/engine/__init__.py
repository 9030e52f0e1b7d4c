"""The engine: load a model, train it, score and sample with it, save and export it.

`meshwright/api.py` makes most of these names public.
"""

from ..recipe import ContextParallel, Lora, MemoryOptions, Pipeline, Recipe
from . import losses
from .adapters import check_export_adapter, export_adapter, why_without_class
from .batching import batches, by_document
from .checkpoint import Resumed, resume, save
from .engine import Engine
from .export import check_export, export
from .inference import embeddings, expert_choices, logits, logprobs, scores, top_logprobs
from .loss import Loss
from .loss_documents import LossDocuments
from .model import Model, init, load
from .mtp import MtpRecord
from .sampling import Decoding, sample, token_stream
from .step_results import StepRecord
from .stream import gather, shards, stream, tensor_specs
from .validation import check_no_placeholders, check_prompts
from .weight_deltas import WeightDeltas
