"""Trainers: loops of a run over a session, with checkpoints, recovery and reports."""
