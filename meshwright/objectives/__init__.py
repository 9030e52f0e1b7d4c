"""Training objectives other than next-token prediction: each is a frozen value with its options and its loss.

>>> engine = mw.Engine(model, lr=5e-7, loss=mw.objectives.Dpo(beta=0.1).loss)      # doctest: +SKIP

An objective also says which head it trains and what its rows are, which `meshwright train` reads. Their terms belong to
pairs, documents or a whole step, so no number depends on the mesh, on packing or on micro-batches.
"""

from .classify import Classify
from .distillation import Distill
from .embedding import ROW, Embedding, last_token_labels
from .embedding_files import add_embedding_files
from .objective import Objective
from .pairs import REFERENCE, Dpo, Orpo, Reward, Simpo
from .rerank import Rerank
from .teacher_scores import TeacherScores, TeacherScoresWriter, weights_fingerprint

# By the name that a run file gives. Without one of them a run predicts the next token.
OBJECTIVES: dict[str, type[Objective]] = {
    "dpo": Dpo, "orpo": Orpo, "simpo": Simpo, "reward": Reward, "classify": Classify, "distill": Distill,
    "embedding": Embedding, "rerank": Rerank,
}  # fmt: skip

__all__ = [
    "OBJECTIVES",
    "REFERENCE",
    "ROW",
    "Classify",
    "Distill",
    "Dpo",
    "Embedding",
    "Objective",
    "Orpo",
    "Rerank",
    "Reward",
    "Simpo",
    "TeacherScores",
    "TeacherScoresWriter",
    "add_embedding_files",
    "last_token_labels",
    "weights_fingerprint",
]
