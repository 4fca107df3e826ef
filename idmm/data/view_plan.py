"""What is drawn of random views before their pixels are made: crops, turns and colours.

Each draw is a function of seed, epoch, image and group of crops. RandAugment draws its own, see
:mod:`idmm.data.views`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from idmm.config.data import Colours
from idmm.data.images import RATIO
from idmm.seeding import derive, uniforms

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # the adjustments of a colour jitter
ORDERS = tuple(permutations(range(4)))  # in which they may come
TRIES = 10  # boxes tried until one fits, as torchvision
BOX_DRAWS = 2 * TRIES + 2  # numbers per view for its box
DRAWS = BOX_DRAWS + 12  # and for its colours
BLUR_SIGMA = (0.1, 2.0)  # pixels

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ViewPlan:
    """The random numbers of V views."""

    box: Integers  # top, left, height and width of the crop in the image (pixels), [V, 4]
    flip: Bools  # [V]
    jitter: Bools  # [V]
    factors: Floats  # brightness, contrast, saturation (factors) and hue (turns), [V, 4]
    order: Integers  # of these four, an index into ORDERS, [V]
    grey: Bools  # [V]
    sigma: Floats  # of the blur (pixels), 0 for none, [V]
    solarize: Bools  # [V]
    vflip: Bools  # [V]
    turns: Integers  # by 90 degrees, counter-clockwise, 0 to 3, [V]

    def part(self, rows: slice) -> "ViewPlan":
        """Return the numbers of some views."""
        values = {name: values[rows] for name, values in vars(self).items()}
        return ViewPlan(**values)


def draw_views(
    colours: Colours,
    scale: Sequence[float],
    count: int,
    key: int,
    indices: Integers,
    sizes: Integers,
) -> ViewPlan:
    """Draw ``count`` views of each image.

    Args:
        colours: Without nulls, see :func:`idmm.config.data.colours_of`.
        scale: Smallest and largest share of an image's area that a crop covers.
        key: From :func:`idmm.seeding.derive`, another for each epoch and group.
        indices: Image numbers, [B].
        sizes: Height and width of these images (pixels), [B, 2].

    Returns:
        The plan of V = B * count views. Those of one image are neighbours.
    """
    numbers = uniforms(key, indices, count * DRAWS).reshape(-1, DRAWS)  # [V, D]
    of_colours = numbers[:, BOX_DRAWS:].T
    flip, jitter, order, grey, blur, sigma, *strengths, solarize, _spare = of_colours
    signed = np.stack(strengths, axis=1) * 2 - 1  # [V, 4] in [-1, 1)
    factors = signed * np.array(colours.jitter) + [1.0, 1.0, 1.0, 0.0]
    least, most = BLUR_SIGMA
    sigma = least + (most - least) * sigma
    turn_key = derive(key, "channels")
    vflip, turns = uniforms(turn_key, indices, count * 2).reshape(-1, 2).T
    return ViewPlan(
        box=draw_boxes(np.repeat(sizes, count, 0), scale, numbers[:, :BOX_DRAWS]),
        flip=flip < colours.flip,
        jitter=jitter < colours.jitter_prob,
        factors=np.maximum(factors, [0.0, 0.0, 0.0, -np.inf]),
        order=(order * len(ORDERS)).astype(np.int64),
        grey=grey < colours.grey_prob,
        sigma=np.where(blur < colours.blur_prob, sigma, 0.0),
        solarize=solarize < colours.solarize_prob,
        vflip=vflip < (colours.vflip or 0),
        turns=(turns * 4).astype(np.int64) * bool(colours.rotate90),
    )


def draw_boxes(
    sizes: Integers,
    scale: Sequence[float],
    numbers: Floats,
) -> Integers:
    """Draw crops that cover a random share of the area at a random ratio, uniformly placed.

    Args:
        sizes: Height and width of each view's image (pixels), [V, 2].
        scale: Smallest and largest share of the area.
        numbers: In [0, 1), [V, BOX_DRAWS].

    Returns:
        Top, left, height, width, [V, 4]. If no try fits, the largest centred box of an allowed
        ratio.
    """
    shares, ratios, places = np.split(numbers, [TRIES, 2 * TRIES], axis=1)  # [V, T] twice, [V, 2]
    limits = sizes.T[..., None].astype(float)  # of rows, of columns, [2, V, 1]
    least, most = scale
    area = limits.prod(0) * (least + (most - least) * shares)  # [V, T]
    low, high = np.log(RATIO)
    ratio = np.exp(low + (high - low) * ratios)  # [V, T]
    tries = np.rint(np.sqrt([area / ratio, area * ratio]))  # [2, V, T]
    is_inside = (tries > 0) & (tries <= limits)
    fits: Bools = np.all(is_inside, axis=0)  # [V, T]
    first = fits.argmax(1)[None, :, None]
    sides = np.take_along_axis(tries, first, axis=2)  # [2, V, 1]
    corner = np.floor(places.T[..., None] * (limits - sides + 1))
    widest = np.rint(limits[::-1] * RATIO[1])
    largest = np.minimum(limits, widest)
    centred = [(limits - largest) // 2, largest]
    has_fit = np.any(fits, axis=1)[:, None]
    box = np.where(has_fit, [corner, sides], centred)  # [2, 2, V, 1]
    return box.reshape(4, -1).T.astype(np.int64)
