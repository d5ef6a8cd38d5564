"""Tasks to train on: prompts, their tokenizer and the reward, one task a file."""
