"""Fisher vectors of patches: how an image's patches differ from a mixture of Gaussians.

Sánchez, Perronnin, Mensink and Verbeek, "Image Classification with the Fisher Vector: Theory and
Practice", IJCV 2013. Patches of three sizes lie on a dense grid. They are described by oriented
gradients (Tola, Lepetit and Fua, "DAISY", PAMI 2010, normalised as in Arandjelović and Zisserman,
"Three things everyone should know to improve object retrieval", CVPR 2012), and by colours.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ORIENTATIONS = 8  # of gradients, over a whole turn
CELLS = (3, 5, 7)  # sides of a cell (pixels). A patch has 4x4 cells
PER_SIDE = 4
STEP = 4  # between patches (pixels)
CLIP = 0.2  # largest value of a cell in a descriptor of length 1 (Lowe, IJCV 2004)
FLAT = 1e-3  # added to lengths: the contrast of flat patches is not blown up
SMALL = 1e-6  # smallest divisor
ITERATIONS = 30  # of the mixture's fit
LEAST_VARIANCE = 1e-4  # of a Gaussian, where the mean variance of patches is 1


class FisherVectors(nn.Module):
    """The Fisher vector of an image's descriptors by a mixture of Gaussians.

    :meth:`learn` finds principal components and mixture by descriptors. Until then both are random.

    Args:
        inputs: Length of a descriptor.
        components: Principal components of descriptors that are used.
        gaussians: Of the mixture, which has diagonal covariances.
    """

    mean: Tensor
    projection: Tensor
    shares: Tensor
    centres: Tensor
    variances: Tensor

    def __init__(self, inputs: int, components: int, gaussians: int):
        super().__init__()
        self.gaussians = gaussians
        self.width = 2 * gaussians * components
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("projection", torch.randn(inputs, components) / math.sqrt(inputs))
        self.register_buffer("shares", torch.full((gaussians,), 1 / gaussians))
        self.register_buffer("centres", torch.randn(gaussians, components))
        self.register_buffer("variances", torch.ones(gaussians, components))

    @torch.no_grad()
    def learn(self, descriptors: Tensor, seed: int) -> None:
        """Fit components and mixture to descriptors [M, inputs].

        Fewer than ten for each Gaussian leave the random ones.
        """
        from sklearn.mixture import GaussianMixture

        if len(descriptors) < 10 * self.gaussians:
            return
        mean = descriptors.mean(0)
        centred = descriptors - mean
        _, axes = torch.linalg.eigh(centred.T @ centred / len(centred))  # in ascending order
        directions = axes[:, -self.centres.shape[1] :]
        points = centred @ directions  # [M, components]
        deviation = points.square().mean().sqrt().clamp(min=SMALL)
        mixture = GaussianMixture(
            self.gaussians,
            covariance_type="diag",
            reg_covar=LEAST_VARIANCE,
            max_iter=ITERATIONS,
            random_state=seed % 2**32,
        )
        with warnings.catch_warnings(action="ignore"):  # a fit near its end is near enough
            mixture.fit((points / deviation).double().numpy())
        self.mean.copy_(mean)
        self.projection.copy_(directions / deviation)
        self.shares.copy_(torch.from_numpy(mixture.weights_))
        self.centres.copy_(torch.from_numpy(mixture.means_))
        self.variances.copy_(torch.from_numpy(mixture.covariances_))

    def forward(self, descriptors: Tensor) -> Tensor:
        """Return Fisher vectors of length 1, [B, P, inputs] -> [B, width].

        They are the gradients with respect to means and deviations, as signed square roots.
        """
        x = (descriptors - self.mean) @ self.projection  # [B, P, d]
        precisions = 1 / self.variances  # [K, d]
        squares = x.square() @ precisions.T - 2 * x @ (self.centres * precisions).T
        constant = (self.centres.square() * precisions + self.variances.log()).sum(1)
        logits = self.shares.clamp(min=SMALL).log() - (squares + constant) / 2
        posteriors = logits.softmax(2).transpose(1, 2)  # [B, K, P]
        total = posteriors.sum(2, keepdim=True)  # [B, K, 1]
        first = posteriors @ x  # [B, K, d]
        second = posteriors @ x.square()
        weight = 1 / (x.shape[1] * self.shares.clamp(min=SMALL).sqrt())[:, None]  # [K, 1]
        by_mean = weight * (first - total * self.centres) * precisions.sqrt()
        moments = second - 2 * self.centres * first + total * self.centres.square()
        by_deviation = weight * (moments * precisions - total) / math.sqrt(2)
        vectors = torch.cat([by_mean.flatten(1), by_deviation.flatten(1)], dim=1)
        return F.normalize(vectors.sign() * vectors.abs().sqrt(), eps=SMALL)


def gradient_descriptors(grey: Tensor) -> Tensor:
    """Return the oriented gradients of all patches, [B, H, W] -> [B, P, 128].

    Square roots of a descriptor of length 1, whose cells are clipped, see the module.
    """
    padded = F.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]  # [B, H, W]
    right = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    maps = []
    for k in range(ORIENTATIONS):
        angle = 2 * math.pi * k / ORIENTATIONS
        maps.append(F.relu(right * math.cos(angle) + down * math.sin(angle)))
    cells = _patches(torch.stack(maps, dim=1))  # [B, P, 128]
    unit = cells / (cells.norm(dim=2, keepdim=True) + FLAT)
    clipped = unit.clamp(max=CLIP)
    lengths = clipped.norm(dim=2, keepdim=True) + SMALL
    roots: Tensor = (clipped / lengths + SMALL**2).sqrt()
    return roots


def colour_descriptors(pixels: Tensor) -> Tensor:
    """Return the mean values of the cells of all patches, [B, C, H, W] -> [B, P, 16 C]."""
    return _patches(pixels)


def _patches(maps: Tensor) -> Tensor:
    """Return means over the cells of all patches, [B, C, H, W] -> [B, P, 16 C]."""
    side = maps.shape[-1]
    parts = []
    for cell in CELLS:
        means = F.avg_pool2d(maps, cell, 1)  # [B, C, h, w]
        tops = torch.arange(0, side - PER_SIDE * cell + 1, STEP, device=maps.device)
        offsets = cell * torch.arange(PER_SIDE, device=maps.device)
        rows = (tops[:, None] + offsets).flatten()  # [n * 4]
        taken = means[:, :, rows][:, :, :, rows]  # [B, C, n * 4, n * 4]
        blocks = taken.unflatten(2, (len(tops), PER_SIDE)).unflatten(4, (len(tops), PER_SIDE))
        ordered = blocks.permute(0, 2, 4, 1, 3, 5)  # [B, n, n, C, 4, 4]
        parts.append(ordered.flatten(3).flatten(1, 2))
    return torch.cat(parts, dim=1)
