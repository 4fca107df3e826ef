"""Boxes and masks from four starts: from scratch, IDMM, supervised, and supervised with drloc.

    python benchmarks/dense_transfer.py --out runs/dense_transfer            four starts, three
    seeds, both tasks python benchmarks/dense_transfer.py --out runs/quick --quick             one
    seed, few epochs: does it run?

The images are composed here. A canvas of 96 x 96 pixels shows 2 to 4 of scikit-learn's digits (8 x
8 pixels, values above 4 of 16), enlarged 3 or 4 times, without overlap. Each has a random light
colour, on noisy blocks of dark colours. Boxes and masks are exact to the pixel. Training canvases
show the first 80 % of the digits, test canvases the rest. Pretraining sees squares around the
objects of training canvases, 1.5 times their longer side, by class.

Each start is pretrained with each seed on the same crops for the same epochs. Detection (Mask
R-CNN) and segmentation (UPerNet) start from it. The table has mean and standard deviation over the
seeds on the test canvases. Every run is an idmm command, and finished runs are skipped.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
from side_by_side import head, mean_and_spread, row

# of canvases and of crops (pixels)
SIDE = 96
CROP = 48
VIT = {
    "patch_size": 8,
    "embed_dim": 96,
    "depth": 4,
    "num_heads": 3,
    "mlp_ratio": 2,
    "global_pool": "avg",
    "class_token": False,
    "weight_init": "jax",
}
MODEL = [
    "--model.name",
    "vit_tiny_patch16_224",
    "--model.kwargs",
    json.dumps(VIT),
    "--model.drop_path",
    0,
]
COMMON = ["--data.workers", 0, "--train.precision", "fp32", "--train.device", "cpu"]
PLAIN = [
    "--views.size",
    CROP,
    "--views.flip",
    0,
    "--views.jitter",
    "[0.4, 0.4, 0.4, 0.1]",
    "--views.blur_prob",
    0,
]
PLAIN += ["--views.grey_prob", 0.2]
PRETRAIN = [
    *PLAIN,
    "--train.batch_size",
    32,
    "--train.lr",
    2e-3,
    "--train.weight_decay",
    1e-3,
    *MODEL,
]
PRETRAIN += ["--train.warmup_epochs", 1, "--train.monitor_every", 1000]
IDMM = ["--config", "idmm_fast", "--method.cutmix_alpha", 0]
LABELS = ["--method.name", "supervised", "--method.cutmix_alpha", 0]
STARTS = {
    "from scratch": None,
    "IDMM": [*IDMM, "--views.crops", "[{count: 2, scale: [0.35, 1.0]}]"],
    "supervised": [*LABELS, "--views.crops", "[{count: 1, scale: [0.35, 1.0]}]"],
    "supervised + drloc": [
        *LABELS,
        "--views.crops",
        "[{count: 1, scale: [0.35, 1.0]}]",
        "--drloc.weight",
        0.1,
    ],
}
TARGET = [
    "--train.size",
    SIDE,
    "--augment.scale",
    "[0.75, 1.33]",
    "--augment.flip",
    0,
    "--train.eval_every",
    1000,
]
TARGET += ["--model.pyramid_width", 48, "--train.batch_size", 4, "--train.lr", 5e-4]
TASKS = {"detect": ("ap", "ap50", "mask_ap"), "segment": ("miou",)}
NAMES = {"ap": "AP", "ap50": "AP50", "mask_ap": "AP of masks", "miou": "mIoU"}


# ---------------------------------------------------------------------- images
def canvas(
    rng: np.random.Generator, digits: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, list[tuple]]:
    """Return an image, uint8 [S, S, 3], and of each object its class and mask, bool [S, S]."""
    noise = rng.uniform(0, 1, (SIDE // 16, SIDE // 16, 3)).repeat(16, 0).repeat(16, 1)
    image = 90 * (noise + np.roll(noise, 8, 0) + np.roll(noise, 8, 1)) / 3 + rng.uniform(
        0, 30, (SIDE, SIDE, 3)
    )
    objects = []
    taken = np.zeros((SIDE, SIDE), dtype=bool)
    wanted = int(rng.integers(2, 5))
    tries = 0
    while len(objects) < wanted and tries < 50:
        tries += 1
        chosen = int(rng.integers(len(digits)))
        scale = int(rng.integers(3, 5))
        stamp = np.kron(digits[chosen] > 4, np.ones((scale, scale), dtype=bool))
        y, x = rng.integers(0, SIDE - len(stamp) + 1, 2)
        if taken[y : y + len(stamp), x : x + len(stamp)].any():
            continue
        taken[y : y + len(stamp), x : x + len(stamp)] = True
        mask = np.zeros((SIDE, SIDE), dtype=bool)
        mask[y : y + len(stamp), x : x + len(stamp)] = stamp
        image[mask] = rng.uniform(120, 255, 3)
        objects.append((int(labels[chosen]), mask))
    return image.astype(np.uint8), objects


def box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Return x1, y1, x2, y2 of a mask (pixels)."""
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def run_lengths(mask: np.ndarray) -> dict:
    """Return a mask as COCO's uncompressed RLE: runs down the columns, background first."""
    flat = mask.T.ravel().astype(int)
    edges = np.flatnonzero(np.diff(flat, prepend=0))
    return {"size": list(mask.shape), "counts": np.diff([0, *edges, len(flat)]).tolist()}


def make_images(out: Path, train: int, test: int) -> Path:
    """Write ``coco``, ``masks`` and ``crops`` under a folder, once, and return it."""
    from PIL import Image
    from sklearn.datasets import load_digits

    root = out / f"images-{train}-{test}"
    found = load_digits()
    if (root / "done").exists():
        return root
    split = int(0.8 * len(found.images))
    for part, count in {"train": train, "val": test}.items():
        own = slice(0, split) if part == "train" else slice(split, None)
        rng = np.random.default_rng([1, part == "val"])
        images = []
        annotations = []
        for folder in (
            "coco/annotations",
            f"coco/{part}",
            f"masks/images/{part}",
            f"masks/masks/{part}",
        ):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image, objects = canvas(rng, found.images[own], found.target[own])
            name = f"{number:04d}.png"
            classes = np.zeros((SIDE, SIDE), dtype=np.uint8)
            images.append({"id": number, "file_name": name, "height": SIDE, "width": SIDE})
            for label, mask in objects:
                classes[mask], (x1, y1, x2, y2) = label + 1, box(mask)
                made = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label + 1,
                    "iscrowd": 0,
                }
                made |= {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": int(mask.sum())}
                annotations.append({**made, "segmentation": run_lengths(mask)})
                if part == "train":
                    place = root / "crops" / "train" / str(label)
                    place.mkdir(parents=True, exist_ok=True)
                    half = round(0.75 * max(x2 - x1, y2 - y1))
                    at = (
                        (x1 + x2) // 2 - half,
                        (y1 + y2) // 2 - half,
                        (x1 + x2) // 2 + half,
                        (y1 + y2) // 2 + half,
                    )
                    at = tuple(min(max(0, value), SIDE) for value in at)
                    Image.fromarray(image).crop(at).save(
                        place / f"{number:04d}-{len(annotations)}.png"
                    )
            Image.fromarray(image).save(root / "coco" / part / name)
            Image.fromarray(image).save(root / "masks" / "images" / part / name)
            Image.fromarray(classes).save(root / "masks" / "masks" / part / name)
        categories = [{"id": label + 1, "name": str(label)} for label in range(10)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "coco" / "annotations" / f"{part}.json").write_text(json.dumps(content))
    (root / "masks" / "classes.txt").write_text(
        "\n".join(["background", *map(str, range(10))]) + "\n"
    )
    (root / "done").touch()
    return root


# ---------------------------------------------------------------------- runs
def run(out: Path, argv: list) -> dict:
    """Run a command line unless it has finished, and return its result."""
    from idmm.cli import main

    if not (out / "result.json").exists():
        code = main([str(word) for word in [*argv, *COMMON, "--out", out]])
        if code:
            sys.exit(f"{out}: exit code {code}")
    return json.loads((out / "result.json").read_text())


def measure(args: argparse.Namespace, root: Path, start: str, seed: int) -> dict[str, float]:
    """Pretrain a start, train both tasks from it and return the scores by name."""
    folder = args.out / f"{start.replace(' + ', '-').replace(' ', '-')}-{seed}"
    init = MODEL
    if STARTS[start] is not None:
        argv = [
            "pretrain",
            *PRETRAIN,
            *STARTS[start],
            "--data.root",
            root / "crops",
            "--seed",
            seed,
        ]
        run(folder / "pretrain", [*argv, "--train.epochs", args.pretrain_epochs])
        init = ["--init", folder / "pretrain", "--model.drop_path", 0]
    scores = {}
    for task, names in TASKS.items():
        where = root / ("coco" if task == "detect" else "masks")
        argv = [task, *TARGET, *init, "--data.root", where, "--seed", seed]
        argv += ["--train.epochs", args.detect_epochs if task == "detect" else args.segment_epochs]
        found = run(folder / task, argv)
        scores |= {name: found[name] for name in names}
    return scores


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return mean and standard deviation over the seeds as a Markdown table."""
    columns = [name for names in TASKS.values() for name in names]
    lines = [head("start", *(NAMES[name] for name in columns))]
    for start, seeds in found.items():
        lines.append(
            row(start, *(mean_and_spread([scores[name] for scores in seeds]) for name in columns))
        )
    return "\n".join(lines)


def main() -> None:
    """Run the missing runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/dense_transfer"), help="folder for images and runs"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each start")
    parser.add_argument("--images", type=int, default=160, help="training canvases")
    parser.add_argument("--test-images", type=int, default=100, help="test canvases")
    parser.add_argument("--detect-epochs", type=int, default=12, help="of detection")
    parser.add_argument(
        "--segment-epochs", type=int, default=24, help="of segmentation, whose steps are cheaper"
    )
    parser.add_argument("--pretrain-epochs", type=int, default=30, help="of each pretraining")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 24 and 16 images, 2 epochs of everything"
    )
    args = parser.parse_args()
    if args.quick:
        args.seeds = 1
        args.images = 24
        args.test_images = 16
        args.detect_epochs = args.segment_epochs = args.pretrain_epochs = 2
    args.out.mkdir(parents=True, exist_ok=True)
    root = make_images(args.out, args.images, args.test_images)
    began = time.monotonic()
    found: dict[str, list[dict[str, float]]] = {start: [] for start in STARTS}
    for seed in range(args.seeds):
        for start in STARTS:
            found[start].append(measure(args, root, start, seed))
    import torch

    where = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "device": "cpu",
    }
    about = {"where": where, "seconds": round(time.monotonic() - began, 1), "scores": found}
    (args.out / "results.json").write_text(json.dumps(about, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
