"""Whole runs, which read from top to bottom: pretrain, finetune, probe, few-label curves, folds."""
