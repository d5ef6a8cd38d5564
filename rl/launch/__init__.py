"""Where a run's processes come from."""
