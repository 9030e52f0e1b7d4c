"""Text -> packed batches."""

from .pack import IGNORE, Batch, pack

__all__ = ["IGNORE", "Batch", "pack"]
