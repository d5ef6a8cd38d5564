"""Recorded steps of a run, trained again, and failing calls, made again."""
