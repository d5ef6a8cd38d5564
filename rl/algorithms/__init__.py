"""Pure functions on tensors: advantages, losses, KL and off-policy corrections."""
