"""Optimizers: how parameters are updated, and which state each one keeps."""
