"""Programs that run a solution of a puzzle and its tests, in two sandboxes."""
