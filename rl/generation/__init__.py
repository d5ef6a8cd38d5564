"""What runs inside one generator rank: the torchtitan model in vLLM, and the loop that steps it."""
