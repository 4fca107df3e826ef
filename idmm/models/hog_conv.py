"""A small convolutional network on hand-made cell maps and a dictionary of the images' own patches.

The maps are those of :mod:`idmm.models.hog`. The dictionary is Coates and Ng, "Learning Feature Representations with
K-means", 2012: whitened patches, spherical K-means, soft thresholds of both signs.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from timm.layers import freeze_batch_norm_2d
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from idmm.models.base import timm_cfg
from idmm.models.build import create_backbone, feature_width
from idmm.models.hog import ORIENTATIONS, SIDE, Hog, normalised_blocks
from idmm.seeding import derive

PATCH = 6  # side of a patch, of images of 32 px
FLOOR = 1.5e-4  # added to a patch's variance: the contrast of flat patches is not blown up
NOISE = 0.1  # added to the variance of each direction of patches before whitening
THRESHOLD = 0.5  # of a patch's likeness to a filter
PATCHES, ROUNDS = 50_000, 10  # patches that K-means sees, at most, and its rounds
DROPPED = 0.5  # of the images in training, whose fixed features are 0, so that the network learns what they show
IMAGES = 4096  # that :meth:`HogConv.learn_start` sees, at most
SMALL = 1e-6  # divisor at least


class Residual(nn.Module):
    """Two 3x3 convolutions beside the identity: [B, D, h, w] -> [B, D, h, w]."""

    def __init__(self, dim: int):
        super().__init__()
        layers = [[nn.BatchNorm2d(dim), nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1, bias=False)] for _ in range(2)]
        self.layers = nn.Sequential(*layers[0], *layers[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, [B, D, h, w] -> [B, D, h, w]."""
        return x + self.layers(x)


class HogConv(Hog):
    """Hand-made features that do not learn, joined with those of a network on their maps; timm's interface.

    The first ``fixed`` features are principal components of the hand-made ones and of the pooled dictionary, turned
    so that all have about the same variance. The other ``dim`` are those of the network. :meth:`learn_start` finds
    dictionary and components by images without labels. Until then both are random.

    Args:
        in_chans: Channels of images.
        num_classes: Of the classifier; 0: none.
        filters: Of the dictionary.
        fixed: Features that do not learn.
        widths: Channels of the network on 8x8 and on 4x4 cells.
        dim: Features of the network.
        pixels: A network on pixels that does not learn, whose pooled features join the fixed ones: ``name`` and
            ``kwargs`` of timm's model, and the ``size`` of its images (pixels). None: there is none.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        filters: int = 200,
        fixed: int = 512,
        widths: tuple[int, int] = (128, 256),
        dim: int = 256,
        pixels: dict | None = None,
    ):
        super().__init__(in_chans, 0)
        self.groups = [self.hand_made, 9 * 2 * filters]  # lengths of the groups of fixed features
        self.pixel_network = None
        if pixels:
            network = create_backbone(pixels["name"], in_chans=in_chans, num_classes=0, **pixels["kwargs"])
            self.pixel_network = freeze_batch_norm_2d(network.requires_grad_(False))
            self.pixel_size = pixels["size"]
            self.groups.append(feature_width(network))
        maps, raw = 4 * ORIENTATIONS + 2 * in_chans + 2 * filters, sum(self.groups)
        self.register_buffer("filters", torch.randn(filters, in_chans, PATCH, PATCH) / PATCH)
        self.register_buffer("offsets", torch.zeros(filters))
        self.register_buffer("centre", torch.zeros(raw))
        self.register_buffer("components", torch.randn(raw, fixed) / math.sqrt(raw))
        self.maps_norm = nn.BatchNorm2d(maps, affine=False)
        self.network = nn.Sequential(
            nn.Conv2d(maps, widths[0], 1),
            Residual(widths[0]),
            nn.Conv2d(widths[0], widths[1], 2, stride=2),
            Residual(widths[1]),
            nn.BatchNorm2d(widths[1]),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * widths[1], dim),
        )
        self.num_features = self.head_hidden_size = fixed + dim
        self.fixed = fixed
        self.reset_classifier(num_classes)

    def _dictionary(self, pixels: Tensor) -> Tensor:
        """Return how like the filters patches are: [B, C, 64, 64] -> [B, 2 filters, 16, 16]."""
        x = F.pad(F.avg_pool2d(pixels, 2), (2, 2, 2, 2), mode="replicate")  # [B, C, 36, 36]
        mean = F.avg_pool2d(x.mean(1, keepdim=True), PATCH, 2)  # [B, 1, 16, 16]
        variance = F.avg_pool2d(x.square().mean(1, keepdim=True), PATCH, 2) - mean.square()
        likeness = F.conv2d(x, self.filters, stride=2) - mean * self.filters.sum((1, 2, 3))[:, None, None]
        likeness = likeness / (variance.clamp(min=0) + FLOOR).sqrt() - self.offsets[:, None, None]
        return torch.cat([F.relu(likeness - THRESHOLD), F.relu(-likeness - THRESHOLD)], dim=1)

    def _network_features(self, x: Tensor) -> list[Tensor]:
        """Return the features of images [B, C, H, W] by the network on pixels, [B, d], if there is one."""
        if self.pixel_network is None:
            return []
        size = (self.pixel_size, self.pixel_size)
        if x.shape[2:] != size:
            x = F.interpolate(x.float(), size=size, mode="bilinear", antialias=True)
        return [self.pixel_network(x.float())]

    def _hand_made(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return maps of pixels [B, C, 64, 64], [B, maps, 8, 8], and all hand-made features [B, d]."""
        blocks = normalised_blocks(F.pad(self.cells(pixels), (1, 1, 1, 1), mode="replicate"))  # [B, 9, 9, 2, 2, 9]
        corners = [blocks[:, i : i + 8, j : j + 8, 1 - i, 1 - j] for i in (0, 1) for j in (0, 1)]
        gradients = torch.cat(corners, dim=3).permute(0, 3, 1, 2)  # [B, 36, 8, 8]: each cell in its four blocks
        mean = F.avg_pool2d(pixels, 8)
        spread = (F.avg_pool2d(pixels.square(), 8) - mean.square()).clamp(min=1e-5).sqrt()
        likeness = self._dictionary(pixels)
        maps = torch.cat([gradients, mean, spread, F.avg_pool2d(likeness, 2).clamp(min=SMALL).sqrt()], dim=1)
        pooled = F.avg_pool2d(likeness, 6, 5).clamp(min=SMALL).sqrt().flatten(1)  # of 3x3 parts that overlap
        return maps, torch.cat([blocks[:, 1:8, 1:8].flatten(1), self.colours(pixels), pooled], dim=1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features, [B, in_chans, H, W] -> [B, D]."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            maps, hand_made = self._hand_made(self.pixels(x))
            fixed = (torch.cat([hand_made, *self._network_features(x)], dim=1) - self.centre) @ self.components
            if self.training:
                fixed = fixed * (torch.rand(len(fixed), 1, device=fixed.device) >= DROPPED)
        return torch.cat([fixed, self.network(self.maps_norm(maps)).float()], dim=1)

    @torch.no_grad()
    def learn_start(self, batches: Iterable[dict], seed: int) -> None:
        """Find the dictionary, the components and the statistics of the maps.

        Args:
            batches: With ``images``, normalised, float [B, C, H, W].
            seed: Of what is drawn.
        """
        draw = torch.Generator().manual_seed(derive(seed, "start"))
        seen = [(self.pixels(batch["images"]), *self._network_features(batch["images"])) for batch in batches]
        pixels, *features = (torch.cat(column)[:IMAGES] for column in zip(*seen, strict=True))  # [N, C, 64, 64], [N, d]
        self._learn_filters(pixels, draw)
        hand_made = [self._hand_made(part) for part in pixels.split(64)]
        norm = self.maps_norm
        sums = [sum(maps.double().pow(power).sum((0, 2, 3)) for maps, _ in hand_made) for power in (1, 2)]
        mean, square = (total / (64 * len(pixels)) for total in sums)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_((square - mean.square()).clamp(min=SMALL))
        raw = torch.cat([torch.cat([values for _, values in hand_made]), *features], dim=1)
        self.centre.copy_(raw.mean(0))
        scale = torch.ones_like(self.centre)
        start = 0
        for count in self.groups:  # all weigh the same
            part = slice(start, start + count)
            spread = raw[:, part].std(0, correction=0)
            scale[part] = 1 / spread.clamp(min=1e-3 * spread.max() + SMALL) / math.sqrt(count)
            start += count
        centred = (raw - self.centre) * scale  # [N, raw]
        rows = min(self.components.shape[1], len(raw))
        directions = torch.linalg.svd(centred, full_matrices=False).Vh[:rows]  # [rows, raw]
        turn = torch.linalg.qr(torch.randn(self.components.shape[1], rows, generator=draw)).Q  # [fixed, rows]
        projection = (turn @ directions).T  # [raw, fixed]
        self.components.copy_(scale[:, None] * projection / (centred @ projection).std().clamp(min=SMALL))

    def _learn_filters(self, pixels: Tensor, draw: torch.Generator) -> None:
        """Set filters and offsets by spherical K-means on whitened patches of images [N, C, 64, 64]."""
        each, patches = max(1, PATCHES // len(pixels)), []
        for part in pixels.split(256):
            some = F.unfold(F.avg_pool2d(part, 2), PATCH).transpose(1, 2)  # [B, 27 * 27, C * 36]
            places = torch.randint(some.shape[1], (len(part), each), generator=draw)
            patches.append(some[torch.arange(len(part))[:, None], places].flatten(0, 1))
        patches = torch.cat(patches)
        patches = patches[patches.var(1, correction=0) > 2 * FLOOR]
        if len(patches) < 10 * len(self.filters):  # flat images: the random filters stay
            return
        patches = patches - patches.mean(1, keepdim=True)
        patches /= (patches.square().mean(1, keepdim=True) + FLOOR).sqrt()
        mean = patches.mean(0)
        variance, axes = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
        whitening = (axes / (variance.clamp(min=0) + NOISE).sqrt()) @ axes.T  # [C * 36, C * 36]
        white = (patches - mean) @ whitening
        rows = F.normalize(white[torch.randperm(len(white), generator=draw)[: len(self.filters)]])  # [filters, C * 36]
        for _ in range(ROUNDS):
            likeness, nearest = (white @ rows.T).max(1)
            sums = torch.zeros_like(rows).index_add_(0, nearest, white * likeness[:, None])
            rows = torch.where(sums.norm(dim=1, keepdim=True) > SMALL, F.normalize(sums), rows)
        filters = rows @ whitening
        self.filters.copy_(filters.view_as(self.filters))
        self.offsets.copy_(filters @ mean)


default_cfgs = generate_default_cfgs({"hog_conv": timm_cfg(input_size=(3, SIDE, SIDE), pool_size=None)})


@register_model
def hog_conv(pretrained: bool = False, **kwargs) -> HogConv:
    """Build a small network on hand-made cell maps, joined with hand-made features."""
    return build_model_with_cfg(HogConv, "hog_conv", pretrained, **kwargs)
