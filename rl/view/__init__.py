"""Pages that show run folders, while a run writes them or after it ended."""
