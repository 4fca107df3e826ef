"""Add a backbone of your own, without a change of the installed package.

    OUT=runs/own python examples/own_backbone.py

It registers a small ConvNet with timm, pretrains it on digits and fine-tunes it. Import the module
that registers the model before you load one of its runs.
"""

import os
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

import idmm
from idmm.models import Backbone

default_cfgs = generate_default_cfgs({"tiny_conv": {"classifier": "head"}})


class TinyConv(Backbone):
    """Images [B, in_chans, H, W] to classes [B, num_classes], or features [B, 4 width] without."""

    def __init__(
        self, num_classes: int = 1000, in_chans: int = 3, width: int = 16, drop_rate: float = 0.0
    ):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_chans, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, kernel_size=3, stride=2, padding=1),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
        )
        self.num_features = 4 * width
        self.drop_rate = drop_rate
        self.reset_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, 4 width, H/4, W/4]."""
        maps: Tensor = self.layers(x)
        return maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """[B, D, h, w] -> [B, num_classes], or the pooled features [B, D]."""
        x = F.dropout(x.mean((2, 3)), self.drop_rate, self.training)
        if not pre_logits:
            x = self.head(x)
        return x


@register_model
def tiny_conv(pretrained: bool = False, **kwargs: Any) -> TinyConv:
    """Two convolutions."""
    return build_model_with_cfg(TinyConv, "tiny_conv", pretrained, **kwargs)


if __name__ == "__main__":
    out = Path(os.environ.get("OUT", "runs/own_backbone"))
    epochs = int(os.environ.get("EPOCHS", "5"))
    digits = {"name": "digits", "workers": 0}
    train = {"epochs": epochs, "batch_size": 32}
    idmm.pretrain(
        {
            "data": digits,
            "model": {"name": "tiny_conv", "kwargs": {"width": 8}},
            "views": {"size": 16},
            "train": train,
            "out": out / "pretrained",
        }
    )
    result = idmm.finetune(
        {
            "data": digits,
            "init": out / "pretrained",
            "train": {**train, "size": 16},
            "out": out / "fine-tuned",
        }
    )
    features = idmm.load_backbone(out / "fine-tuned").num_features
    print(f"top-1 {result['top1']:.1f} % of the test images, with {features} features")
