"""Evaluation: accuracy, kNN, probes, features, collapse, and the predictor of finished runs."""
