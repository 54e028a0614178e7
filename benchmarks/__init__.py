"""Measurements. Nothing here is imported by the pack or by its workers."""
