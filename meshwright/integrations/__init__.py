"""Training backends for RL frameworks, verl and AReaL: each registers Meshwright with one framework.

Only the modules named after a framework import it, so Meshwright runs without any of them installed.
"""
