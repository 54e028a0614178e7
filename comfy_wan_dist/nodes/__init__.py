"""The nodes: one file per step of the graph. Each validates, makes one call to the group, and wraps the result."""
