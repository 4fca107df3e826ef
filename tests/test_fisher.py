"""Fisher vectors of patches against loops that are written from the papers."""

import math

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from numpy.testing import assert_allclose
from sklearn.datasets import load_sample_images

from idmm.models.fisher import FisherVectors, colour_descriptors, gradient_descriptors

SIDE = 32
CELLS = (3, 5, 7)


def vector_by_loop(x, shares, centres, variances):
    """Sánchez et al., IJCV 2013: equations 16 to 18, a square root with the sign, and length 1.

    x: [T, D].
    """
    deviations = np.sqrt(variances)
    by_mean = np.zeros_like(centres)
    by_deviation = np.zeros_like(centres)
    for point in x:
        density = []
        for share, centre, deviation in zip(shares, centres, deviations, strict=True):
            normal = np.exp(-(((point - centre) / deviation) ** 2) / 2) / deviation
            density.append(share * normal.prod())
        for k, share in enumerate(shares):
            posterior = density[k] / sum(density)
            apart = (point - centres[k]) / deviations[k]
            by_mean[k] += posterior * apart / math.sqrt(share)
            by_deviation[k] += posterior * (apart**2 - 1) / math.sqrt(2 * share)
    vector = np.concatenate([by_mean.ravel(), by_deviation.ravel()]) / len(x)
    vector = np.sign(vector) * np.sqrt(np.abs(vector))
    return vector / np.linalg.norm(vector)


def patches_by_loop(maps):
    """Means of the 4x4 cells of each patch, every 4 pixels, [C, H, W] -> [P, 16 C]."""
    patches = []
    for cell in CELLS:
        for top in range(0, SIDE - 4 * cell + 1, 4):
            for left in range(0, SIDE - 4 * cell + 1, 4):
                values = []
                for channel in maps:
                    for i in range(4):
                        for j in range(4):
                            rows = slice(top + i * cell, top + (i + 1) * cell)
                            columns = slice(left + j * cell, left + (j + 1) * cell)
                            values.append(channel[rows, columns].mean())
                patches.append(values)
    return np.array(patches)


def gradients_by_loop(grey):
    """Eight maps of the gradient's part along a direction, [H, W] -> [8, H, W]."""
    padded = np.pad(grey, 1, mode="edge")
    maps = np.zeros((8, *grey.shape))
    for row, column in np.ndindex(grey.shape):
        down = padded[row + 2, column + 1] - padded[row, column + 1]
        right = padded[row + 1, column + 2] - padded[row + 1, column]
        for k in range(8):
            angle = math.radians(45 * k)
            along = right * math.cos(angle) + down * math.sin(angle)
            maps[k, row, column] = max(0.0, along)
    return maps


@pytest.fixture(scope="module")
def photos():
    """Parts of two photographs, [2, 3, 32, 32] in [0, 1]."""
    parts = [image[100 : 100 + SIDE, 200 : 200 + SIDE] for image in load_sample_images().images]
    return torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2).float() / 255


def learned(descriptors, components=5, gaussians=4, seed=0):
    vectors = FisherVectors(descriptors.shape[-1], components, gaussians)
    vectors.learn(descriptors.flatten(0, -2), seed)
    return vectors


def test_the_vector_is_that_of_the_paper():
    """Of points around four centres, as the mixture finds them."""
    rng = default_rng(0)
    points = rng.normal(size=(2, 300, 8)) + 4 * np.eye(8)[rng.integers(0, 4, (2, 300))]
    descriptors = torch.from_numpy(points).float()
    vectors = learned(descriptors)
    actual = vectors(descriptors)
    assert actual.shape == (2, 2 * 4 * 5)
    mixture = [getattr(vectors, name).double().numpy() for name in ("shares", "centres")]
    variances = vectors.variances.double().numpy()
    for row, image in zip(actual.numpy(), points, strict=True):
        x = (image - vectors.mean.double().numpy()) @ vectors.projection.double().numpy()
        assert_allclose(row, vector_by_loop(x, *mixture, variances), atol=2e-4)
    again = learned(descriptors)(descriptors)
    assert torch.equal(actual, again), "from the seed"


def test_components_are_principal_ones_and_the_mixture_fits():
    """Twenty directions of which two vary, in which there are three groups."""
    rng = default_rng(0)
    centres = np.array([[9.0, 0], [-9, 9], [-9, -9]])
    group = rng.integers(0, 3, 600)
    directions = np.linalg.qr(rng.normal(size=(20, 2)))[0]
    plane = centres[group] + rng.normal(size=(600, 2))
    points = plane @ directions.T + 0.01 * rng.normal(size=(600, 20))
    vectors = learned(torch.from_numpy(points).float(), components=2, gaussians=3)
    space = np.linalg.qr(vectors.projection.double().numpy())[0]
    assert np.linalg.svd(space.T @ directions)[1].min() > 0.999
    assert_allclose(np.sort(vectors.shares), np.sort(np.bincount(group) / 600), atol=0.01)
    scaled = (points - points.mean(0)) @ vectors.projection.double().numpy()
    assert np.square(scaled).mean() == pytest.approx(1, abs=1e-3)


def test_patches_are_those_of_a_loop_over_pixels(photos):
    actual = colour_descriptors(photos)
    expected = np.stack([patches_by_loop(photo) for photo in photos.double().numpy()])
    assert actual.shape == expected.shape == (2, 36 + 16 + 4, 48)
    assert_allclose(actual, expected, atol=1e-6)


def test_gradients_are_those_of_a_loop_over_pixels(photos):
    """DAISY's maps; a descriptor of length 1 is clipped at 0.2, and its root taken."""
    grey = photos.mean(1)
    for actual, image in zip(gradient_descriptors(grey), grey.double().numpy(), strict=True):
        cells = patches_by_loop(gradients_by_loop(image))
        unit = cells / (np.linalg.norm(cells, axis=1, keepdims=True) + 1e-3)
        clipped = unit.clip(max=0.2)
        expected = np.sqrt(clipped / np.linalg.norm(clipped, axis=1, keepdims=True))
        assert_allclose(actual, expected, atol=1e-3)


def test_few_and_flat_patches_give_finite_vectors():
    """Of fewer than ten patches for each Gaussian the random mixture stays."""
    flat = torch.linspace(0, 1, 16)[:, None, None].repeat(1, SIDE, SIDE)
    for descriptors in (gradient_descriptors(flat), colour_descriptors(flat[:, None])):
        few = FisherVectors(descriptors.shape[-1], 5, 4)
        before = few.centres.clone()
        few.learn(descriptors[0, :39], 0)
        assert torch.equal(few.centres, before)
        for vectors in (few, learned(descriptors)):
            assert bool(torch.isfinite(vectors(descriptors)).all())
