"""Process groups, collectives, the sharding plan, and what they do to a plain model."""
