"""The algorithm on one page, and the state that a checkpoint holds."""
