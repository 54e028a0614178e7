"""The life of a rank's process."""
