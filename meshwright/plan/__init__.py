"""What is known of a model on a mesh without running it: where parameters lie, what a step sends, what cannot be."""

from .find import TINY, Say, find
from .refusals import check_devices, check_layout, check_memory
