"""What a rank holds between jobs, and the memory for it."""
