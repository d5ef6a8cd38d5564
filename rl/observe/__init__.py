"""Output of a run: its folder, spans, progress and curves."""
