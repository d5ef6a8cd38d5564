"""The direct push: from the trainer's shards to the generator's, with no full tensor in between."""
