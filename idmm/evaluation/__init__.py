"""What a network is worth: accuracy, kNN, probes, features, collapse; the predictor of finished runs."""
