"""The inspector: walks everywhere, builds nothing."""

from .oracles import Finding, examine
from .recorder import Recorder, Seen
from .trial import Reference, Trial, refer

__all__ = ["Finding", "Recorder", "Reference", "Seen", "Trial", "examine", "refer"]
