"""Datasets, decoded images, views and loaders."""

from idmm.data.registry import DATASETS

__all__ = ["DATASETS"]
