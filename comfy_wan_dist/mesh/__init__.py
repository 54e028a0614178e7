"""The mesh: degrees, their one spelling, validation, rank table, shards and memory. Pure Python, no torch."""
