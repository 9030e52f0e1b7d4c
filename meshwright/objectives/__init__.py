"""Training objectives other than next-token prediction: each is a frozen value with its options and its loss.

>>> engine = mw.Engine(model, lr=5e-7, loss=mw.objectives.Dpo(beta=0.1).loss)      # doctest: +SKIP

An objective also says which head it trains and what its rows are, which `meshwright train` reads. Their terms belong to
pairs, documents or a whole step, so no number depends on the mesh, on packing or on micro-batches.
"""

from .embedding import Embedding, last_token_labels
from .embedding_files import add_embedding_files
from .pairs import Dpo, Orpo, Reward, Simpo

__all__ = ["Dpo", "Embedding", "Orpo", "Reward", "Simpo", "add_embedding_files", "last_token_labels"]
