"""What a run trains on: prompts, their tokenizer and the reward. One task a file."""
