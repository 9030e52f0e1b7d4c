"""The trainer: one file, one command."""
