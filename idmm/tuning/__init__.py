"""Comparing settings of a recipe on held-out images: what is tried, one trial, the search, its results."""
