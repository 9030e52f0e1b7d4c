"""The trainer: one file, one command, and its parts for a loop of your own."""

from .config import Config
from .metrics import JsonLines, Lines, Sink
from .run import Trainer
from .schedule import schedule
from .sources import Data, data_of
from .toml import config_of, read
