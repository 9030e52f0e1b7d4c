"""Training objectives other than next-token prediction: DPO, ORPO, SimPO, reward models, distillation, embeddings.

>>> engine = mw.Engine(model, lr=5e-7, loss=mw.objectives.Dpo(beta=0.1).loss)      # doctest: +SKIP

An objective is a frozen dataclass with its options and its loss. It also declares which head it trains and what a row
of data is; `meshwright train` reads both. A term belongs to a token, a pair, a document or a whole step, so no result
depends on the mesh, on packing or on micro-batches.
"""

from .classify import Classify
from .distillation import Distill
from .embedding import ROW, Embedding, last_token_labels
from .embedding_files import add_embedding_files
from .objective import Objective
from .pairs import REFERENCE, Dpo, Orpo, Reward, Simpo
from .rerank import Rerank
from .teacher_scores import TeacherScores, TeacherScoresWriter, weights_fingerprint

# Keys are the names in a run file. A run without an objective trains next-token prediction.
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
