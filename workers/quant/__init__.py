"""Weights that stay quantised."""
