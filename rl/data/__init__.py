"""Data to train on: rows of files and datasets, examples of tokens, their order, batches."""
