"""Datasets, decoded images, views and loaders."""

from idmm.data.datasets import DATASETS

__all__ = ["DATASETS"]
