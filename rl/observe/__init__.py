"""What a run leaves behind and shows while it runs: its folder, spans, progress and curves."""
