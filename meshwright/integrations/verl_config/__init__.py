"""Configs that verl's Hydra finds with hydra.searchpath=[pkg://meshwright.integrations.verl_config]."""
