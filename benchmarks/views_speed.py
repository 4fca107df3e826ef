"""The cost of training images against torchvision on Pillow images, one operation after the other.

    python benchmarks/views_speed.py --out views.json
    python benchmarks/views_speed.py --channels 5 --bits 16
    python benchmarks/views_speed.py --stage finetune --size 32 --image 32 32

All make the crops and colours of IDMM's recipe (2 + 4 crops at 112 px), or of the recipe 'fast' of
fine-tuning (one crop of 35 % and more, flips), from the same decoded images on one thread. Each
round times all in rotating order, in processor time of this process. The table has the median of
the rounds' ratios. The images are smooth noise. torchvision's colours need 8-bit RGB, so other
images are timed without it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from side_by_side import head, ratios, row, turns, where, write
from torchvision.transforms import v2

from idmm.config import IMAGENET_MEAN, IMAGENET_STD, METHODS, Augment, Views
from idmm.data.views import MultiCropTransform, TrainTransform


def smooth_noise(count: int, height: int, width: int, channels: int = 3) -> Iterator[np.ndarray]:
    """Yield images, uint8 [H, W, C], whose content costs no time."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        noise = cv2.GaussianBlur(
            rng.integers(0, 256, (height, width, channels), dtype=np.uint8), (0, 0), 3
        )
        yield cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX)


class Images:
    """Decoded images, as :class:`idmm.data.image_store.ImageStore` gives them."""

    def __init__(self, count: int, height: int, width: int, channels: int, bits: int):
        self.arrays = [
            noise.reshape(height, width, -1)
            for noise in smooth_noise(count, height, width, channels)
        ]
        if bits == 16:
            self.arrays = [array.astype(np.uint16) * 257 for array in self.arrays]
        self.rgb = (channels, bits) == (3, 8)
        self.pillow = [Image.fromarray(array) for array in self.arrays] if self.rgb else []
        self.sizes = np.array([[height, width]] * count)
        self.labels = None
        self.channels = channels
        self.pixel_bytes = np.full(count, channels * bits // 8)

    def image(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.arrays[i]).permute(2, 0, 1)


def by_torchvision(config: Views) -> list[v2.Compose]:
    """The same views of a Pillow image, a transform for each group of crops."""
    steps = [
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomApply([v2.GaussianBlur(13, (0.1, 2.0))], 0.5),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    crop = partial(v2.RandomResizedCrop, config.size, interpolation=v2.InterpolationMode.BICUBIC)
    return [v2.Compose([crop(tuple(group.scale)), *steps]) for group in config.crops]


def of_stage(
    images: Images, args, norm
) -> tuple[MultiCropTransform | TrainTransform, list[tuple[v2.Compose, int]]]:
    """Return a stage's transform, and torchvision's for the same with how many views each makes of
    an image."""
    if args.stage == "pretrain":
        config = Views(crops=list(METHODS["idmm"].CROPS), size=args.size)
        theirs = zip(by_torchvision(config), (group.count for group in config.crops), strict=True)
        return MultiCropTransform(images, config, *norm, seed=0), list(theirs)
    config = Augment(scale=[0.35, 1.0], jitter_prob=0.0, grey_prob=0.0, randaugment=None)
    crop = v2.RandomResizedCrop(
        args.size, tuple(config.scale), interpolation=v2.InterpolationMode.BICUBIC
    )
    steps = [crop, v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    theirs = v2.Compose([*steps, v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    return TrainTransform(images, config, args.size, *norm, key=0), [(theirs, 1)]


def rows(images: Images, args) -> dict[str, Callable[[int], object]]:
    """Return the functions to time, by name. They take the number of a round."""
    indices = np.arange(args.images)
    norm = (
        (IMAGENET_MEAN, IMAGENET_STD)
        if args.channels == 3
        else ([0.5] * args.channels, [0.25] * args.channels)
    )
    ours, theirs = of_stage(images, args, norm)

    def pillow(number: int) -> list[torch.Tensor]:
        return [
            torch.stack([make(im) for im in images.pillow for _ in range(n)]) for make, n in theirs
        ]

    makers = {"torchvision": pillow} if images.rgb else {}
    return {**makers, "workers": lambda n: ours(n, indices)}


def compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Print the cost of each row, and return its speed as a multiple of torchvision's."""
    faster = {}
    print(head("", "ms per image", "images/s", "ratio to torchvision"))
    for name, values in seconds.items():
        cost = statistics.median(values)
        found = ""
        if "torchvision" in seconds:
            found = ratios(seconds["torchvision"], values)
            faster[name] = found.median
        print(row(name, f"{1000 * cost:.3f}", f"{1 / cost:.0f}", found))
    return faster


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", default="pretrain", choices=("pretrain", "finetune"))
    parser.add_argument("--size", type=int, default=112, help="side of the crops (pixels)")
    parser.add_argument(
        "--image",
        type=int,
        nargs=2,
        default=[300, 340],
        help="height and width of the images (pixels)",
    )
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--bits", type=int, default=8, choices=(8, 16))
    parser.add_argument("--images", type=int, default=32, help="images of a round")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--quick", action="store_true", help="a few images and rounds, to see that it runs"
    )
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    args = parser.parse_args()
    if args.quick:
        args.images = 8
        args.rounds = 2
    torch.set_num_threads(1)
    images = Images(args.images, *args.image, args.channels, args.bits)
    makers = rows(images, args)
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for number, name in turns(list(makers), args.rounds + 1):
        start = time.process_time()
        makers[name](number)
        if number:  # the first round warms up
            seconds[name].append((time.process_time() - start) / args.images)
    at = where("cpu", 1, ["torch", "torchvision"]) + f", opencv {cv2.__version__}"
    what = f"{args.channels} channels of {args.bits} bits"
    crops = "2 + 4 crops" if args.stage == "pretrain" else "a crop"
    print(f"{args.image[0]} x {args.image[1]} images of {what}, {crops} of {args.size} px, {at}\n")
    faster = compared(seconds)
    write(args.out, where=at, **vars(args), seconds=seconds, ratios=faster)


if __name__ == "__main__":
    main()
