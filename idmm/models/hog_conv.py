"""Features that do not learn, hand-made ones and those of a frozen network, joined with a network
that does.

The hand-made features are those of :mod:`idmm.models.hog` and Fisher vectors
(:mod:`idmm.models.fisher`) of gradients and of colours.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import freeze_batch_norm_2d
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.models.base import any_tensor, resized
from idmm.models.build import Kwargs, create_backbone, feature_width
from idmm.models.fisher import FisherVectors, colour_descriptors, gradient_descriptors
from idmm.models.hog import SIDE, SMALL, Hog
from idmm.seeding import derive

GAUSSIANS = 16
GRADIENTS = 48  # principal components of gradients that Fisher vectors use
COLOURS = 24  # the same of colours, at most
PATCHES = 40_000  # of all images, that the mixtures are fitted to, at most
IMAGES = 1024  # that :meth:`HogConv.learn_start` should see, at most
DEPTHS = 3  # of a frozen network, before its last features
# their weights in products of features. Each hand-made group has 1 (benchmarks/results/features.md)
DEPTH_WEIGHTS = (0.5, 1.0, 1.0, 2.0)
# of the logits of a network that learned (benchmarks/results/features.md)
LEARNED_WEIGHT = 0.25
BLOCKS = 6  # stages from which on they are the blocks of a transformer
CONVNET: dict[str, Any] = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}


class PixelNetwork(nn.Module):
    """A timm model without classifier on images resized to ``size`` (pixels)."""

    def __init__(self, in_chans: int, name: str, kwargs: Kwargs, size: int):
        super().__init__()
        self.network = create_backbone(name, size, in_chans=in_chans, **kwargs)
        self.size = size

    @property
    def width(self) -> int:
        """Width d of the features."""
        return feature_width(self.network)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled features, [B, C, H, W] -> [B, d]."""
        outputs: Tensor = self.network(resized(x, self.size))
        return outputs


class FrozenNetwork(nn.Module):
    """A timm model that does not learn, on images of several ``sizes`` (pixels).

    Its features are those of :data:`DEPTHS` depths and the last ones, if timm gives them.
    """

    def __init__(self, in_chans: int, name: str, kwargs: Kwargs, sizes: list[int]):
        super().__init__()
        self.network = create_backbone(name, sizes[-1], in_chans=in_chans, **kwargs)
        self.sizes = sizes
        freeze_batch_norm_2d(self.requires_grad_(False))
        self.eval()
        with torch.no_grad():
            black = torch.zeros(1, in_chans, sizes[-1], sizes[-1])
            self.widths = [group.shape[1] for group in self(black)]
        depths = len(self.widths) // len(sizes)
        self.weights = [*DEPTH_WEIGHTS[-depths:]] * len(sizes)

    def train(self, mode: bool = True) -> "FrozenNetwork":
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return a group of features for each size and depth, [B, C, H, W] -> each [B, d]."""
        groups = []
        for size in self.sizes:
            groups += self._at_depths(resized(x, size))
        return groups

    def _at_depths(self, x: Tensor) -> list[Tensor]:
        network: Any = self.network
        if not hasattr(network, "forward_intermediates"):
            return [network(x)]
        stages = len(network.feature_info)
        taken = list(range(max(0, stages - DEPTHS), stages))
        if stages > BLOCKS:
            taken = [stages // 2 - 1, 3 * stages // 4 - 1, stages - 1]
        last, maps = network.forward_intermediates(x, indices=taken, output_fmt="NCHW")
        pooled = network.forward_head(last, pre_logits=True)
        return [*(values.mean((2, 3)) for values in maps), pooled]


class HogConv(Hog):
    """Features that do not learn, joined with those of a network that does; timm's interface.

    The first ``fixed`` features do not learn. They are groups: hand-made ones, two Fisher vectors,
    and those of ``frozen``. Each group is centred and has a length of its own. The others are those
    of ``learned``. :meth:`learn_start` finds mixtures and centre by images without
    labels. Until then they are random.

    In training mode the fixed features are 0 if there is a network that learns. So a linear
    classifier on all features, fitted to the fixed ones and then trained, adds the logits of two
    classifiers that learned apart. Those of the network count a quarter.

    Args:
        in_chans: Channels of images.
        num_classes: Of the classifier; 0: none.
        learned: The network that learns: arguments of :class:`PixelNetwork`. Empty: there is none,
            and only the classifier learns.
        frozen: One that does not: arguments of :class:`FrozenNetwork`. None: none.
        global_pool: As for :class:`Hog`.
    """

    centre: Tensor

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        learned: Kwargs = CONVNET | {"size": SIDE},  # timm drops arguments that are None
        frozen: Kwargs | None = None,
        global_pool: str = "",
    ):
        super().__init__(in_chans, 0, global_pool)
        self.gradients = FisherVectors(128, GRADIENTS, GAUSSIANS)
        self.colours = FisherVectors(16 * in_chans, min(COLOURS, 16 * in_chans), GAUSSIANS)
        # lengths of the groups of fixed features
        self.groups = [self.hand_made, self.gradients.width, self.colours.width]
        weights = [1.0] * 3
        self.frozen: FrozenNetwork | None = None
        self.learned: PixelNetwork | None = None
        if frozen:
            self.frozen = FrozenNetwork(in_chans, **frozen)
            self.groups += self.frozen.widths
            weights += self.frozen.weights
        self.scales = [math.sqrt(weight) for weight in weights]
        self.fixed = sum(self.groups)
        self.register_buffer("centre", torch.zeros(self.fixed))
        self.num_features = self.fixed
        if learned:
            self.learned = PixelNetwork(in_chans, **learned)
            self.num_features += self.learned.width
        self.head_hidden_size = self.num_features
        self.reset_classifier(num_classes)

    def raw(self, x: Tensor) -> Tensor:
        """Return the fixed features before they are centred, [B, C, H, W] -> [B, fixed]."""
        pixels = self.pixels(x)  # [B, C, 64, 64]
        groups = [
            self.features_of(pixels),
            self.gradients(gradient_descriptors(self.grey(pixels))),
            self.colours(colour_descriptors(pixels)),
        ]
        if self.frozen is not None:
            groups += self.frozen(x.float())
        return torch.cat(groups, dim=1)

    def scaled(self, raw: Tensor) -> Tensor:
        """Return fixed features, each group centred and of the length that its weight gives it."""
        groups = (raw - self.centre).split(self.groups, dim=1)
        parts = []
        for group, scale in zip(groups, self.scales, strict=True):
            parts.append(scale * F.normalize(group, eps=SMALL))
        return torch.cat(parts, dim=1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features, [B, in_chans, H, W] -> [B, D]."""
        if self.training and self.learned is not None:  # that network learns on its own
            fixed = torch.zeros(len(x), self.fixed, device=x.device)
        else:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                fixed = self.scaled(self.raw(x))
        if self.learned is None:
            return fixed
        learned = self.learned(x).float()
        if not self.training:
            learned = LEARNED_WEIGHT * learned
        return torch.cat([fixed, learned], dim=1)

    @torch.no_grad()
    def learn_mixtures(self, batches: Iterable[Batch], seed: int) -> None:
        """Fit the mixtures of the Fisher vectors to patches of images.

        Args:
            batches: With ``images``, normalised, float [B, C, H, W].
            seed: Of what is drawn.
        """
        draw = torch.Generator().manual_seed(derive(seed, "start"))
        pixels = torch.cat([self.pixels(batch["images"]) for batch in batches])  # [N, C, 64, 64]
        each = max(1, PATCHES // len(pixels))
        gradients = []
        colours = []
        for part in pixels.split(64):
            described = gradient_descriptors(self.grey(part))  # [B, P, 128]
            coloured = colour_descriptors(part)
            numbers = torch.randint(described.shape[1], (len(part), each), generator=draw)
            images = torch.arange(len(part))[:, None]
            gradients.append(described[images, numbers].flatten(0, 1))
            colours.append(coloured[images, numbers].flatten(0, 1))
        self.gradients.learn(torch.cat(gradients), derive(seed, "gradients"))
        self.colours.learn(torch.cat(colours), derive(seed, "colours"))

    @torch.no_grad()
    def learn_start(self, batches: Iterable[Batch], seed: int) -> None:
        """Fit the mixtures and set the centre. Arguments as of :meth:`learn_mixtures`."""
        kept = list(batches)
        self.learn_mixtures(kept, seed)
        device = any_tensor(self).device
        raw = [self.raw(batch["images"].to(device)) for batch in kept]
        self.centre.copy_(torch.cat(raw).mean(0))


default_cfgs = generate_default_cfgs(
    {"hog_conv": dict(input_size=(3, SIDE, SIDE), classifier="head")}
)


@register_model
def hog_conv(pretrained: bool = False, **kwargs: Any) -> HogConv:
    """Build features that do not learn, joined with a small ConvNet."""
    return build_model_with_cfg(HogConv, "hog_conv", pretrained, **kwargs)
