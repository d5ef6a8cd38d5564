"""Prompts, scored rollouts and their metrics. The generator is only an async function here."""
