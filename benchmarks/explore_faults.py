"""Are planted duplicates, wrong labels and strangers found by `idmm explore`? (docs/explore.md)

    python benchmarks/small_sets.py ... --out sets         its text says where the images come from
    python benchmarks/explore_faults.py --sets sets --out runs/faults

Of the training images of a set (at most --images, evenly drawn) some get a second copy: saved as JPEG of quality 30 to
70, cropped to 80 to 90 % of each side and brought back to the old size, made brighter or darker and of other contrast,
mirrored, or made half or one and a half times as large. Copies keep the class. Of the other images some are moved into
the folder of another class, drawn at random, and a few images of another set are put among them. Then IDMM pretrains a
small network without labels by `idmm train`'s recipe (idmm_fast, resnet10t with 16 to 128 channels, 32 or 64 px, two crops of
35 to 100 %, no colours), and every score is compared with what was planted. Finished runs are kept.

Average precision (AP) needs no threshold; precision and recall are of the lists that the score's own threshold gives.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

KINDS = ("jpeg", "crop", "light", "mirror", "resize")
COPIED, MOVED, STRANGE = 0.1, 0.08, 0.01  # shares of the images
PRETRAIN = Path(__file__).parents[1] / "pretrain.py"
SIZES = {"photos": 32, "stamps": 64, "fashion": 32, "digits": 32, "speech": 64}  # of the crops (pixels)
STRANGERS = {"photos": "stamps", "stamps": "fashion", "fashion": "photos", "digits": "fashion", "speech": "stamps"}


# ---------------------------------------------------------------------- planting
def copy_of(image: Image.Image, kind: str, rng: np.random.Generator) -> Image.Image:
    """Returns the image changed; JPEG is what its file does."""
    width, height = image.size
    if kind == "crop":
        share = rng.uniform(0.8, 0.9)
        w, h = round(share * width), round(share * height)
        left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
        return image.crop((left, top, left + w, top + h)).resize((width, height), Image.Resampling.BICUBIC)
    if kind == "light":
        image = ImageEnhance.Brightness(image).enhance(rng.choice([rng.uniform(0.6, 0.8), rng.uniform(1.2, 1.4)]))
        return ImageEnhance.Contrast(image).enhance(rng.choice([rng.uniform(0.6, 0.8), rng.uniform(1.2, 1.4)]))
    if kind == "mirror":
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if kind == "resize":
        share = rng.choice([0.5, 1.5])
        return image.resize((round(share * width), round(share * height)), Image.Resampling.BICUBIC)
    return image


def plant(sets: Path, name: str, most: int, seed: int, out: Path) -> None:
    """Writes out/train/CLASS/* and out/faults.json: {"copies": [[original, copy, kind]], "moved": {image: its own
    class}, "strangers": [image]}, of names as a split has them."""
    rng = np.random.default_rng([seed, len(name)])
    paths = sorted((sets / name / "train").glob("*/*"))
    paths = [paths[i] for i in sorted(rng.permutation(len(paths))[:most])]
    classes = sorted({path.parent.name for path in paths})
    order = rng.permutation(len(paths))
    copied, moved = int(COPIED * len(paths)), int(MOVED * len(paths))
    faults = {"copies": [], "moved": {}, "strangers": []}
    numbers = iter(rng.permutation(10 * most))  # names that tell nothing

    def write(image: Image.Image, label: str, suffix: str = "png", **how) -> str:
        place = f"train/{label}/{next(numbers):05d}.{suffix}"
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        image.save(out / place, **how)
        return place

    for rank, i in enumerate(order):
        image, label = Image.open(paths[i]).convert("RGB"), paths[i].parent.name
        if copied <= rank < copied + moved:
            other = rng.choice([one for one in classes if one != label])
            faults["moved"][write(image, other)] = label
            continue
        original = write(image, label)
        if rank < copied:
            kind = KINDS[rank % len(KINDS)]
            how = {"suffix": "jpg", "quality": int(rng.integers(30, 71))} if kind == "jpeg" else {}
            faults["copies"].append([original, write(copy_of(image, kind, rng), label, **how), kind])
    others = sorted((sets / STRANGERS[name] / "test").glob("*/*"))
    for i in rng.permutation(len(others))[: max(4, int(STRANGE * len(paths)))]:
        faults["strangers"].append(write(Image.open(others[i]).convert("RGB"), rng.choice(classes)))
    (out / "faults.json").write_text(json.dumps(faults, indent=1) + "\n")


def pretrain(data: Path, out: Path, epochs: int, size: int, seed: int, flip: float, network: str) -> None:
    """Pretrains on the images by the recipe of ``idmm train``."""
    model = {"resnet": ["resnet10t", "{channels: [16, 32, 64, 128]}"], "vit": [
        "vit_tiny_patch16_224",
        "{patch_size: 8, embed_dim: 96, depth: 4, num_heads: 3, global_pool: avg, class_token: false, weight_init: jax}",
    ]}[network]  # fmt: skip
    flags = {
        "config": "idmm_fast", "data.root": data, "out": out, "seed": seed, "data.workers": 0, "train.epochs": epochs,
        "train.batch_size": 32, "train.lr": 2e-3, "train.precision": "fp32", "train.device": "cpu",
        "model.name": model[0], "model.kwargs": model[1], "views.size": size, "views.flip": flip,
        "views.crops": "[{count: 2, scale: [0.35, 1.0]}]", "views.jitter_prob": 0, "views.grey_prob": 0,
        "views.blur_prob": 0,
    }  # fmt: skip
    words = [f"--{key}={value}" for key, value in flags.items()]
    subprocess.run([sys.executable, PRETRAIN, *words], check=True)


def main() -> None:
    """Plants, pretrains and measures all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=["photos", "stamps", "fashion"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--network", choices=["resnet", "vit"], default="resnet")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for seed in args.seeds:
        for name in args.names:
            data, run = args.out / f"{name}-{seed}", args.out / f"{name}-{seed}-{args.network}"
            if not (data / "faults.json").exists():
                plant(args.sets, name, args.images, seed, data)
            flip = 0.0 if name in ("digits", "speech") else 0.5
            pretrain(data, run, args.epochs, SIZES[name], seed, flip, args.network)


if __name__ == "__main__":
    main()
