"""Tasks to train on: prompts, tokenizer and reward, one task a file."""
