"""From prompts to scored rollouts to a training batch.

Knows the generator only as an async function.
"""
