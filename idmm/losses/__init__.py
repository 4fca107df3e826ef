"""The maths, as pure functions."""

from idmm.losses.instance import instance_discrimination_loss

__all__ = ["instance_discrimination_loss"]
