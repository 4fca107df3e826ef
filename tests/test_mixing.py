"""CutMix and Mixup: boxes, shares, partners."""

import numpy as np
import pytest
import torch

from idmm.methods.mixing import Mix, draw_cutmix, draw_mixup, mix_images


def test_share_is_that_of_the_pixels_left_outside_the_box():
    for seed in range(200):
        mix = draw_cutmix(4, 17, 23, 0.5, np.random.default_rng(seed))
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= 17 and 0 <= left <= right <= 23
        own = torch.arange(4.0)[:, None, None, None].expand(4, 1, 17, 23)
        mixed = mix_images(own, mix)
        kept = (mixed == own).double().mean((1, 2, 3))
        for i in range(4):
            assert float(kept[i]) == pytest.approx(1.0 if mix.partner[i] == i else mix.lam)


def test_larger_share_stays_and_a_clipped_box_only_raises_it():
    shares = []
    for seed in range(300):
        drawn = np.random.default_rng(seed).beta(0.5, 0.5)
        mix = draw_cutmix(2, 64, 64, 0.5, np.random.default_rng(seed))
        assert mix.lam >= max(drawn, 1 - drawn) - 1e-9
        shares.append(mix.lam)
    assert 0.5 <= min(shares) < 0.6 and max(shares) > 0.99


def test_partners_are_a_permutation():
    for draw in (lambda rng: draw_cutmix(11, 8, 8, 0.5, rng), lambda rng: draw_mixup(11, 0.5, rng)):
        partner = draw(np.random.default_rng(0)).partner
        assert sorted(partner.tolist()) == list(range(11))
        assert partner.tolist() != list(range(11))


def test_mixing_takes_the_partners_pixels_and_leaves_its_input_alone():
    images = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    mixed = mix_images(images, Mix(0.5, torch.tensor([2, 0, 1]), (1, 4, 2, 6)))
    for i, partner in enumerate([2, 0, 1]):
        for y in range(6):
            for x in range(6):
                inside = 1 <= y < 4 and 2 <= x < 6
                assert torch.equal(mixed[i, :, y, x], images[partner if inside else i, :, y, x])
    blended = mix_images(images, Mix(0.75, torch.tensor([2, 0, 1]), None))
    torch.testing.assert_close(blended[0], 0.75 * images[0] + 0.25 * images[2])
    assert torch.equal(images, before)
