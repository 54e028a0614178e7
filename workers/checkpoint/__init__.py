"""From files to a rank's shard."""
