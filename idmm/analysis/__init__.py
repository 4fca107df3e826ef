"""Looking at runs: pictures, and the demo that compares pretraining with none."""
