"""Backends for frameworks of reinforcement learning: each module registers Meshwright with one of them.

A framework is imported in the module of its name and nowhere else, so Meshwright needs none of them.
"""
