"""Documents -> packed batches."""

from .arguments import WEIGHT, check_shifted
from .batch import IGNORE, Batch
from .pack import cut, pack, shift
