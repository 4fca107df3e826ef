"""What pictures show of images of any number of channels and any depth."""

import numpy as np
import pytest

from idmm.data.composite import composite

DRAWN = np.random.default_rng(0)


def image(channels, dtype=np.uint8, low=0, high=256):
    return DRAWN.integers(low, high, (20, 30, channels)).astype(dtype)


def stretched(channel):
    low, high = np.percentile(channel, (1, 99))
    return np.clip(np.rint((channel - low) / (high - low) * 255), 0, 255)


def test_8_bit_rgb_stays():
    rgb = image(3)
    np.testing.assert_array_equal(composite(rgb), rgb)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_bands_are_stretched_each_of_its_own(dtype):
    found = image(5, dtype, 10, 60)
    wanted = np.stack([stretched(found[..., band].astype(float)) for band in range(3)], 2)
    made = composite(found)
    assert made.dtype == np.uint8 and made.min() == 0 and made.max() == 255
    np.testing.assert_array_equal(made, wanted)


def test_two_are_red_and_green_and_one_is_grey():
    two = composite(image(2, np.uint16, 0, 900))
    assert two.shape == (20, 30, 3) and two[..., 0].max() == two[..., 1].max() == 255 and not two[..., 2].any()
    one = composite(image(1, np.uint16, 0, 900))
    assert one.max() == 255 and (one == one[..., :1]).all()


def test_a_constant_channel_is_black():
    found = image(4, np.uint16, 0, 900)
    found[..., 1] = 700
    made = composite(found)
    assert not made[..., 1].any() and made[..., 0].max() == 255
