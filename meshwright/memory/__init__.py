"""Estimate the memory of a training step on each rank (parameters, optimizer state, gradients, activations) without
running it."""
