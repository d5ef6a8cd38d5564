"""Direct push of weights from the trainer's shards to the generator's, without full tensors."""
