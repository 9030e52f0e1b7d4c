"""Documents -> packed batches."""

from .batch import IGNORE, Batch
from .pack import pack
