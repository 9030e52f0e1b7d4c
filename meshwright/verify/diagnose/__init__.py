"""Guess the cause of a finding. A guess is wrong where two mistakes give the same numbers; a finding is not."""
