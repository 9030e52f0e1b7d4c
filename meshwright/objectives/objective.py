"""The protocol of a training objective: the head that it trains, what its rows are, and its loss."""

from typing import ClassVar, Protocol

from ..engine import Loss


class Objective(Protocol):
    """A training objective: a frozen dataclass of options.

    `head`: the model's head. `rows`: what a row of data becomes: "pairs" of documents, the chosen answer first;
    "scored_pairs", with a label at the last token of each alone; "labelled", a document with its class; "retrieval", a
    query with its positive and negatives; "reranked", a prompt for each of these; or "documents", as in a run without
    an objective.
    """

    head: ClassVar[str]
    rows: ClassVar[str]

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine."""
