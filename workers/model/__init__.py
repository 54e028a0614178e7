"""The Wan transformer as one device runs it."""
