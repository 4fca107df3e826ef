"""Section 3 of the IDMM paper: contrastive learning and deep clustering as special cases, and the
gradients."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from idmm.losses import instance_discrimination_loss
from idmm.losses.contrastive import info_nce

close = partial(assert_close, rtol=1e-12, atol=1e-12)
close_gradient = partial(assert_close, rtol=1e-10, atol=1e-12)
N = 6  # images
WIDTH = 5


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def random_rows(generator, count=N):
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def loss_of_image(z, w, i, smoothing=0.0):
    """The loss of one feature z [d] of image i, by the function that trains."""
    return instance_discrimination_loss(z[None], w, torch.tensor([i]), smoothing=smoothing)


def alignment_and_uniformity(anchor, positive, negatives):
    """Eq. 4: the terms of one anchor, term by term."""
    alignment = -(anchor @ positive)
    others = sum(torch.exp(anchor @ negative) for negative in negatives)
    uniformity = torch.log(torch.exp(anchor @ positive) + others)
    return alignment + uniformity


def test_rows_equal_to_features_give_a_contrastive_loss(generator):
    """Eq. 5: w = z."""
    z = random_rows(generator)
    for i in range(N):
        negatives = [z[j] for j in range(N) if j != i]
        expected = alignment_and_uniformity(z[i], z[i], negatives)
        close(loss_of_image(z[i], z, i), expected)


def test_rows_equal_to_the_first_view_give_two_views(generator):
    """Eqs. 6 and 7: w = z_A. The loss of the second view is contrastive, that of the first is Eq.
    5."""
    first = random_rows(generator)
    second = random_rows(generator)
    for i in range(N):
        negatives = [first[j] for j in range(N) if j != i]
        eq6 = alignment_and_uniformity(second[i], first[i], negatives)
        eq7 = alignment_and_uniformity(first[i], first[i], negatives)
        both = loss_of_image(second[i], first, i) + loss_of_image(first[i], first, i)
        close(both, eq6 + eq7)


def test_rows_equal_to_keys_give_the_loss_of_moco_v3(generator):
    query = F.normalize(random_rows(generator), dim=1)
    key = F.normalize(random_rows(generator), dim=1)
    temperature = 0.2
    ours = instance_discrimination_loss(query / temperature, key, torch.arange(N), smoothing=0.0)
    expected = info_nce(query, key, temperature)
    close(2 * temperature * ours, expected)


def test_shared_rows_give_deep_clustering_with_a_prior(generator):
    """Eqs. 8 to 11: one row per cluster. The size of a cluster acts as its prior."""
    clusters = [0, 1, 1, 2, 2, 2]
    z = random_rows(generator)
    centres = random_rows(generator, count=3)
    sizes = [clusters.count(k) for k in range(3)]
    w = centres[torch.tensor(clusters)]  # [N, d]
    for i, cluster in enumerate(clusters):
        logits = [centres[k] @ z[i] + math.log(sizes[k]) for k in range(3)]
        norm = torch.log(sum(torch.exp(logit) for logit in logits))
        deep_clustering = norm - logits[cluster]
        expected = deep_clustering + math.log(sizes[cluster])
        close(loss_of_image(z[i], w, i), expected)


def test_equal_clusters_give_deep_clustering_plus_a_constant(generator):
    """Eq. 12 with three clusters of two images."""
    z = random_rows(generator)
    centres = random_rows(generator, count=3)
    clusters = torch.tensor([0, 0, 1, 1, 2, 2])
    deep_clustering = F.cross_entropy(z @ centres.T, clusters)
    ours = instance_discrimination_loss(z, centres[clusters], torch.arange(N), smoothing=0.0)
    close(ours, deep_clustering + math.log(2))


def test_gradients_of_feature_and_rows(generator):
    """Eqs. 14 to 16."""
    z = random_rows(generator, count=1)[0].requires_grad_()
    w = random_rows(generator).requires_grad_()
    i = 2
    dz, dw = torch.autograd.grad(loss_of_image(z, w, i), (z, w))
    p = torch.softmax(w @ z, dim=0).detach()  # [N]
    expected = -w[i] + sum(p[j] * w[j] for j in range(N))
    close_gradient(dz, expected)
    for k in range(N):
        close_gradient(dw[k], (p[k] - float(k == i)) * z)


def test_label_smoothing_is_two_cross_entropies(generator):
    """Eq. 18."""
    z = random_rows(generator, count=1)[0]
    w = random_rows(generator)
    smoothing = 0.1
    i = 3
    others = sum(w[k] @ z for k in range(N) if k != i)
    expected = (
        -(1 - smoothing) * (w[i] @ z) - smoothing / (N - 1) * others + torch.logsumexp(w @ z, 0)
    )
    ours = loss_of_image(z, w, i, smoothing)
    close(ours, expected)


def test_cutmix_moves_two_rows_much_and_all_rows_a_little(generator):
    """Eq. 20 with the target of the others that makes all targets sum to one."""
    z = random_rows(generator, count=1)
    w = random_rows(generator).requires_grad_()
    i = 1
    partner = 4
    lam = 0.7
    smoothing = 0.1
    loss = instance_discrimination_loss(
        z, w, torch.tensor([i]), torch.tensor([partner]), lam, smoothing
    )
    (dw,) = torch.autograd.grad(loss, w)
    p = torch.softmax(w @ z[0], dim=0).detach()
    share = smoothing / (N - 1)
    targets = dict.fromkeys(range(N), share)
    targets[i] = lam * (1 - smoothing) + (1 - lam) * share
    targets[partner] = (1 - lam) * (1 - smoothing) + lam * share
    assert math.isclose(sum(targets.values()), 1)
    for k in range(N):
        close_gradient(dw[k], (p[k] - targets[k]) * z[0])


def test_targets_of_the_papers_example():
    """Below Eq. 20: lambda 0.5 and N = 2040. The others have 4.9e-5, where the paper has 2.5e-5."""
    n = 2040
    z = torch.ones(1, 1, dtype=torch.float64)
    w = torch.zeros(n, 1, dtype=torch.float64, requires_grad=True)
    loss = instance_discrimination_loss(z, w, torch.tensor([0]), torch.tensor([1]), 0.5, 0.1)
    (dw,) = torch.autograd.grad(loss, w)
    targets = 1 / n - dw[:, 0]
    assert round(float(targets[0]), 2) == round(float(targets[1]), 2) == 0.45
    for target in targets[2:]:
        assert f"{float(target):.1e}" == "4.9e-05"
