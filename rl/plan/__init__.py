"""Plan of a run: its ranks' places and memory, and the time of a step."""
