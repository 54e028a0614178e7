"""From what a node is asked for to the pieces that planes do."""
