"""Rehearsal of a run's models on GPUs that do not exist: the real engine on a fake CUDA device.

A rehearsal changes torch for the rest of its process, so ``python -m rl.plan --rehearse`` starts
one of its own.
"""
