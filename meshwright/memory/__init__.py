"""Simulate the memory that a training step takes on each rank, on the meta device, before any is allocated."""
