"""Hydra configs for verl, used with hydra.searchpath=[pkg://meshwright.integrations.verl_config]."""
