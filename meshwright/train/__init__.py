"""The trainer behind `meshwright train`: one file describes a run. Its parts are usable in a loop of your own.

A run goes through these modules: config_file reads and checks the file (config, config_checks, preflight); launch
tokenises the data (data_sources) and starts the ranks (processes); each rank (rank, run) builds model and engine,
resumes (resume_point), and runs the loop (loop), which writes metrics that display shows. failure finds the rank that
failed first.
"""

from .config import Config
from .config_file import config_of, read
from .data_sources import TrainingData, training_data
from .lr_schedule import schedule
from .metrics import JsonLines, Lines, Sink
from .run import Trainer
