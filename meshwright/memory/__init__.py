"""Estimate the memory of a training step on each rank (parameters, optimizer state, gradients, activations) without
running it.

`meta_model` copies a rank's shard to the meta device, `simulate` runs it and finds the peak, `fsdp_buffers` counts the
bytes that FSDP2 would hold meanwhile, `budget` compares the sum with the device and suggests what would fit.
`meshwright plan` prints the result for meshes that need not exist.
"""
