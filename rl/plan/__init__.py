"""What a run would be: where its ranks go, what they hold, how long a step takes."""
