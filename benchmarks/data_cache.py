"""What the cache of decoded images saves (docs/datasets.md): loader epochs side by side, and the time to start.

    python benchmarks/data_cache.py --images 400 --rounds 5

Makes a folder of JPEGs (500 x 375, quality 90, cut from scikit-learn's two photographs) unless --root names one, then
times, in each round and in turn, an epoch of the loader alone, without a network, for the three places that decoded
images can be: nowhere ('off': decoded at every use), memory ('ram') and disk. Ratios are those of the same round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

PLACES = ("off", "ram", "disk")


def make_photos(folder: Path, count: int) -> None:
    """Writes ``count`` JPEGs under FOLDER/train, in two classes."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    rng = np.random.default_rng(0)
    for number in range(count):
        name = ("china", "flower")[number % 2]
        photo = Image.fromarray(load_sample_image(f"{name}.jpg"))
        left, top = rng.integers(photo.width - 500 + 1), rng.integers(photo.height - 375 + 1)
        path = folder / "train" / name / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + 500, top + 375)).save(path, quality=90)


def load(root: Path, place: str, cache_dir: Path, bound: int):
    """Opens the training split as a run does; returns the store and the seconds it took."""
    from idmm import config
    from idmm.data.cache import load_split
    from idmm.data.datasets import open_splits

    start = time.perf_counter()
    data = config.Data(name="folder", root=str(root), cache=place, cache_dir=str(cache_dir))
    split = open_splits(data, labelled=False).train
    store = load_split(split, bound=bound, data=data)
    return store, time.perf_counter() - start


def epoch(maker, count: int, workers: int) -> float:
    """Seconds for all batches of an epoch."""
    from idmm.data.loaders import BatchPlan, training_batches

    start = time.perf_counter()
    for _ in training_batches(maker, BatchPlan(count, batch_size=64, epochs=1, seed=0), workers):
        pass
    return time.perf_counter() - start


def measure(root: Path, folder: Path, rounds: int, workers: int) -> list[str]:
    """Returns the table's lines."""
    from idmm.config import IMAGENET_MEAN, IMAGENET_STD, Augment, Views
    from idmm.config.recipes import default_crops
    from idmm.data.augment import TrainTransform
    from idmm.data.views import MultiCropTransform, short_side_bound

    crops = default_crops("idmm")
    views, augment = Views(crops=crops), Augment()
    plain = Views(crops=crops, jitter_prob=0, grey_prob=0, blur_prob=0)
    tasks = {
        "stage 1, 2 + 4 views at 112 px": (
            short_side_bound(112, 0.05),
            lambda s: MultiCropTransform(s, views, *norm, seed=0),
        ),
        "stage 1, the crops alone": (
            short_side_bound(112, 0.05),
            lambda s: MultiCropTransform(s, plain, *norm, seed=0),
        ),
        "stage 2, 224 px": (short_side_bound(224, 0.08), lambda s: TrainTransform(s, augment, 224, *norm, key=0)),
    }
    norm = (IMAGENET_MEAN, IMAGENET_STD)
    lines = ["| loader alone | off (s) | ram (s) | disk (s) | off / ram | off / disk |", "|---|---|---|---|---|---|"]
    for name, (bound, make) in tasks.items():
        stores = {place: load(root, place, folder / "cache", bound)[0] for place in PLACES}
        seconds = {place: [] for place in PLACES}
        for _ in range(rounds):
            for place in PLACES:
                seconds[place].append(epoch(make(stores[place]), len(stores[place]), workers))
        times = " | ".join(f"{statistics.median(seconds[place]):.2f}" for place in PLACES)
        ratios = " | ".join(_ratio(seconds["off"], seconds[place]) for place in ("ram", "disk"))
        lines.append(f"| {name} | {times} | {ratios} |")
    first, again = [], []
    for number in range(rounds):
        first.append(load(root, "disk", folder / f"fresh{number}", 579)[1])
        again.append(load(root, "disk", folder / f"fresh{number}", 579)[1])
    start = (
        f"start of a run: {statistics.median(first):.2f} s to fill the cache, {statistics.median(again):.3f} s to find"
    )
    return [*lines, "", f"{start} it filled ({_ratio(first, again)} times as fast)"]


def _ratio(slow: list[float], fast: list[float]) -> str:
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a folder of images of your own")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = given.root
        if root is None:
            root = Path(folder) / "photos"
            make_photos(root, given.images)
        lines = measure(root, Path(folder), given.rounds, given.workers)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
