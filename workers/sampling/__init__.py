"""Solvers and the denoise loop."""
