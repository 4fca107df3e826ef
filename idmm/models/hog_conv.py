"""Hand-made features and a dictionary of the images' own patches, joined with a small ConvNet.

The hand-made features are those of :mod:`idmm.models.hog`. The dictionary is Coates and Ng,
"Learning Feature Representations with K-means", 2012: whitened patches, spherical K-means, soft
thresholds of both signs.
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
from idmm.models.hog import SIDE, SMALL, Hog
from idmm.seeding import derive

PATCH = 6  # side of a patch, of images of 32 px
FLOOR = 1.5e-4  # added to a patch's variance: the contrast of flat patches is not blown up
NOISE = 0.1  # added to the variance of each direction of patches before whitening
THRESHOLD = 0.5  # of a patch's likeness to a filter
# patches that K-means sees, at most, and its rounds
PATCHES = 50_000
ROUNDS = 10
IMAGES = 4096  # that :meth:`HogConv.learn_start` should see, at most
CONVNET: dict[str, Any] = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}


class PixelNetwork(nn.Module):
    """A timm model without classifier on images resized to ``size`` (pixels)."""

    def __init__(self, in_chans: int, name: str, kwargs: Kwargs, size: int):
        super().__init__()
        self.network = create_backbone(name, in_chans=in_chans, **kwargs)
        self.size = size

    @property
    def width(self) -> int:
        """Width d of the features."""
        return feature_width(self.network)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled features, [B, C, H, W] -> [B, d]."""
        outputs: Tensor = self.network(resized(x, self.size))
        return outputs


class HogConv(Hog):
    """Hand-made features that do not learn, joined with those of a ConvNet that does; timm's
    interface.

    The first ``fixed`` features are principal components of the hand-made ones, of the pooled
    dictionary and of the features of ``frozen``. They are turned so that all have about the same
    variance. The others are those of the ConvNet. :meth:`learn_start` finds dictionary and
    components by images without labels. Until then both are random.

    In training mode the fixed features are 0 if there is a ConvNet. So a linear classifier on all
    features, fitted to the fixed ones and then trained, adds the logits of two classifiers that
    learned apart.

    ``learned`` and ``frozen`` are the arguments of :class:`PixelNetwork`: timm's ``name`` and
    ``kwargs``, and the ``size`` of its images (pixels).

    Args:
        in_chans: Channels of images.
        num_classes: Of the classifier; 0: none.
        filters: Of the dictionary.
        fixed: Features that do not learn.
        learned: The ConvNet on pixels. Empty: there is none, and only the classifier learns.
        frozen: A network on pixels that does not learn, whose pooled features join the fixed ones.
            None: none.
        say: Margin of the ConvNet in the sum of logits, relative to that of the classifier on fixed
            features (:meth:`weigh_learned`). 0: that which it comes to by training. With few labels
            it comes to be too sure.
        global_pool: As for :class:`Hog`.
    """

    filters: Tensor
    offsets: Tensor
    centre: Tensor
    components: Tensor
    learned_weight: Tensor

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        filters: int = 200,
        fixed: int = 512,
        learned: Kwargs = CONVNET | {"size": SIDE},  # timm drops arguments that are None
        frozen: Kwargs | None = None,
        say: float = 0.0,
        global_pool: str = "",
    ):
        super().__init__(in_chans, 0, global_pool)
        self.groups = [self.hand_made, 9 * 2 * filters]  # lengths of the groups of fixed features
        self.frozen: PixelNetwork | None = None
        self.learned: PixelNetwork | None = None
        if frozen:
            self.frozen = PixelNetwork(in_chans, **frozen)
            freeze_batch_norm_2d(self.frozen.requires_grad_(False))
            self.groups.append(self.frozen.width)
        inputs = sum(self.groups)
        self.register_buffer("filters", torch.randn(filters, in_chans, PATCH, PATCH) / PATCH)
        self.register_buffer("offsets", torch.zeros(filters))
        self.register_buffer("centre", torch.zeros(inputs))
        self.register_buffer("components", torch.randn(inputs, fixed) / math.sqrt(inputs))
        # of the ConvNet's features after training
        self.register_buffer("learned_weight", torch.ones(()))
        self.fixed = fixed
        self.say = say
        self.num_features = fixed
        if learned:
            self.learned = PixelNetwork(in_chans, **learned)
            self.num_features += self.learned.width
        self.head_hidden_size = self.num_features
        self.reset_classifier(num_classes)

    def _dictionary(self, pixels: Tensor) -> Tensor:
        """Return how like the filters patches are: [B, C, 64, 64] -> [B, 2 filters, 16, 16]."""
        halved = F.avg_pool2d(pixels, 2)
        x = F.pad(halved, (2, 2, 2, 2), mode="replicate")  # [B, C, 36, 36]
        mean = F.avg_pool2d(x.mean(1, keepdim=True), PATCH, 2)  # [B, 1, 16, 16]
        squares = F.avg_pool2d(x.square().mean(1, keepdim=True), PATCH, 2)
        deviation = ((squares - mean.square()).clamp(min=0) + FLOOR).sqrt()
        sums = self.filters.sum((1, 2, 3))[:, None, None]
        likeness = F.conv2d(x, self.filters, stride=2) - mean * sums
        likeness = likeness / deviation - self.offsets[:, None, None]
        # like, and unlike
        return F.relu(torch.cat([likeness, -likeness], dim=1) - THRESHOLD)

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return pixels [B, C, 64, 64] of images [B, C, H, W], and a frozen network's features."""
        if self.frozen is None:
            return (self.pixels(x),)
        # while the rest learns its start, only this one is on a GPU
        features = self.frozen(x.float().to(any_tensor(self.frozen).device))
        return self.pixels(x), features.to(x.device)

    def _raw(self, pixels: Tensor, *features: Tensor) -> Tensor:
        """Return all features that do not learn, [B, C, 64, 64] -> [B, sum(groups)]."""
        # 3x3 parts overlap
        pooled = F.avg_pool2d(self._dictionary(pixels), 6, 5)
        roots = pooled.clamp(min=SMALL).sqrt().flatten(1)
        return torch.cat([self.features_of(pixels), roots, *features], dim=1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features, [B, in_chans, H, W] -> [B, D]."""
        if self.training and self.learned is not None:  # the ConvNet learns on its own
            fixed = torch.zeros(len(x), self.fixed, device=x.device)
        else:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                fixed = (self._raw(*self._inputs(x)) - self.centre) @ self.components
        if self.learned is None:
            return fixed
        learned = self.learned(x).float()
        if not self.training:
            learned = self.learned_weight * learned
        return torch.cat([fixed, learned], dim=1)

    @torch.no_grad()
    def weigh_learned(self, logits: Tensor, labels: Tensor, smoothing: float) -> None:
        """Set the weight of the ConvNet's features in evaluation, if ``say`` asks for one.

        A margin is the logit of the class less the mean of the others. On its training images a
        ConvNet comes to the margin at which its loss with ``smoothing`` is least. Without
        smoothing the margin has no limit, and nothing is set.

        Args:
            logits: Of the classifier on fixed features for the training images, [N, K].
            labels: Their classes, int64 [N].
            smoothing: Label smoothing of the training that follows.
        """
        if not self.say or not smoothing:
            return
        classes = logits.shape[1]
        right = logits.gather(1, labels[:, None])[:, 0]
        others = (logits.sum(1) - right) / (classes - 1)
        margin = (right - others).mean()
        limit = math.log(1 + (1 - smoothing) * classes / smoothing)
        self.learned_weight.copy_(self.say * margin / limit)

    @torch.no_grad()
    def learn_start(self, batches: Iterable[Batch], seed: int) -> None:
        """Find the dictionary and the components.

        Args:
            batches: With ``images``, normalised, float [B, C, H, W].
            seed: Of what is drawn.
        """
        draw = torch.Generator().manual_seed(derive(seed, "start"))
        parts = [self._inputs(batch["images"]) for batch in batches]
        inputs = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        self._learn_filters(inputs[0], draw)
        chunks = [tensor.split(64) for tensor in inputs]
        raw = torch.cat(list(map(self._raw, *chunks)))
        self.centre.copy_(raw.mean(0))
        scales = []
        # all groups weigh the same
        for spread in raw.std(0, correction=0).split(self.groups):
            floor = 1e-3 * spread.max() + SMALL
            scales.append(1 / spread.clamp(min=floor) / math.sqrt(len(spread)))
        scale = torch.cat(scales)
        centred = (raw - self.centre) * scale  # [N, sum(groups)]
        # [rank, sum(groups)]
        directions = torch.linalg.svd(centred, full_matrices=False).Vh[: self.fixed]
        # [fixed, rank]
        random = torch.randn(self.fixed, len(directions), generator=draw)
        turn = torch.linalg.qr(random).Q
        projection = (turn @ directions).T  # [sum(groups), fixed]
        deviation = (centred @ projection).std().clamp(min=SMALL)
        self.components.copy_(scale[:, None] * projection / deviation)

    def _learn_filters(self, pixels: Tensor, draw: torch.Generator) -> None:
        """Set filters and offsets by spherical K-means on patches of images [N, C, 64, 64]."""
        patches = _drawn_patches(pixels, draw)
        patches = patches[patches.var(1, correction=0) > 2 * FLOOR]
        count = len(self.filters)
        if len(patches) < 10 * count:  # flat images: the random filters stay
            return
        patches = patches - patches.mean(1, keepdim=True)
        patches /= (patches.square().mean(1, keepdim=True) + FLOOR).sqrt()
        mean = patches.mean(0)
        centred = patches - mean
        variance, axes = torch.linalg.eigh(centred.T @ centred / len(patches))
        scale = (variance.clamp(min=0) + NOISE).sqrt()
        whitening = (axes / scale) @ axes.T  # [C * 36, C * 36]
        white = centred @ whitening
        first = torch.randperm(len(white), generator=draw)[:count]
        rows = F.normalize(white[first])  # [filters, C * 36]
        for _ in range(ROUNDS):
            likeness, nearest = (white @ rows.T).max(1)
            sums = torch.zeros_like(rows).index_add_(0, nearest, white * likeness[:, None])
            is_used = sums.norm(dim=1, keepdim=True) > SMALL
            rows = torch.where(is_used, F.normalize(sums), rows)
        filters = rows @ whitening
        self.filters.copy_(filters.view_as(self.filters))
        self.offsets.copy_(filters @ mean)


def _drawn_patches(pixels: Tensor, draw: torch.Generator) -> Tensor:
    """Return random patches of images [N, C, 64, 64] at half their side, [P, C * 36]."""
    each = max(1, PATCHES // len(pixels))
    patches = []
    for part in pixels.split(256):
        # [B, 27 * 27, C * 36]
        unfolded = F.unfold(F.avg_pool2d(part, 2), PATCH).transpose(1, 2)
        positions = torch.randint(unfolded.shape[1], (len(part), each), generator=draw)
        images = torch.arange(len(part))[:, None]
        patches.append(unfolded[images, positions].flatten(0, 1))
    return torch.cat(patches)


default_cfgs = generate_default_cfgs(
    {"hog_conv": dict(input_size=(3, SIDE, SIDE), classifier="head")}
)


@register_model
def hog_conv(pretrained: bool = False, **kwargs: Any) -> HogConv:
    """Build hand-made features, joined with a small ConvNet."""
    return build_model_with_cfg(HogConv, "hog_conv", pretrained, **kwargs)
