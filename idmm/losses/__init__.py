"""Losses as pure functions."""

from idmm.losses.drloc import DenseRelativeLocalization
from idmm.losses.instance import instance_discrimination_loss

__all__ = ["DenseRelativeLocalization", "instance_discrimination_loss"]
