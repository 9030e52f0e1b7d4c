"""The trainer: one file, one command, and its parts for a loop of your own."""

from .config import Config
from .config_file import config_of, read
from .data_sources import TrainingData, training_data
from .lr_schedule import schedule
from .metrics import JsonLines, Lines, Sink
from .run import Trainer
