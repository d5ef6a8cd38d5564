"""Chat dialects of model families: messages to tokens, and which of these are sampled."""
