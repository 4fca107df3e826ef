"""Whole runs, read from top to bottom."""
