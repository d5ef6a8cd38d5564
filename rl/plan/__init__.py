"""Plan of a run: places and memory of its ranks, and the time of a step."""
