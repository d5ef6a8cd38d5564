"""Output of a run: run folder, spans, progress and curves."""
