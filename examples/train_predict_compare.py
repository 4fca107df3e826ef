"""Train, predict and compare by the Python API, on a folder of images.

    OUT=runs/example python examples/train_predict_compare.py

It writes scikit-learn's digits as a folder, of which 10 images per class have labels. It compares
the classifier of idmm.train with training from scratch, MINUTES (half a minute) each. The same
command continues a stopped run.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import idmm

LABELLED = 10  # images per class
OUT = Path(os.environ.get("OUT", "runs/example"))
MINUTES = float(os.environ.get("MINUTES", "0.5"))


def write_images(folder: Path) -> None:
    """Write digits as train/CLASS/*.png, unlabelled/*.png and test/CLASS/*.png."""
    digits = load_digits()
    numbers = np.arange(len(digits.target))
    train, test = train_test_split(numbers, test_size=0.2, stratify=digits.target, random_state=0)
    counts = dict.fromkeys(digits.target_names, 0)
    for number in train:
        label = digits.target[number]
        counts[label] += 1
        part = f"train/{label}" if counts[label] <= LABELLED else "unlabelled"
        write_image(folder / part / f"{number}.png", digits.images[number])
    for number in test:
        write_image(folder / f"test/{digits.target[number]}/{number}.png", digits.images[number])


def write_image(path: Path, greys: np.ndarray) -> None:
    """Write an image [H, W] of greys from 0 to 16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((greys * 255 / 16).astype(np.uint8)).save(path)


def trained() -> dict[str, Any]:
    """Train by the plan that ``idmm.train`` chooses, and return the classifier's result."""
    summary = idmm.train(
        {
            "data": {"root": OUT / "images", "workers": 0},
            "minutes": MINUTES,
            "out": OUT / "trained",
        }
    )
    result: dict[str, Any] = summary["result"]
    return result


def trained_from_scratch() -> dict[str, Any]:
    """Train a ConvNet on the labelled images only, and return its result."""
    result: dict[str, Any] = idmm.finetune(
        {
            "data": {"root": OUT / "images", "workers": 0},
            "model": {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}},
            "train": {"size": 32, "minutes": MINUTES, "batch_size": 16, "lr": 2e-3},
            "augment": {"flip": 0.0, "randaugment": None, "mixup_alpha": 0, "cutmix_alpha": 0},
            "out": OUT / "scratch",
        }
    )
    return result


if __name__ == "__main__":
    write_images(OUT / "images")
    results = {"trained": trained(), "scratch": trained_from_scratch()}

    print(f"baseline {results['scratch']['baseline_top1']:.1f} % of the test images")
    for name, result in results.items():
        low, high = result["top1_interval"]
        print(f"{name} {result['top1']:.1f} %, 95 % interval {low:.1f} to {high:.1f}")

    images = sorted((OUT / "images" / "test").rglob("*.png"))
    labels = [path.parent.name for path in images]
    right = {}
    for name in results:
        predictions = idmm.load_classifier(OUT / name).predict(images)
        right[name] = np.array(predictions.labels) == labels
    print(
        f"only right by idmm.train: {np.sum(right['trained'] & ~right['scratch'])} images, "
        f"only right from scratch: {np.sum(right['scratch'] & ~right['trained'])}"
    )
    likeliest = idmm.load_classifier(OUT / "trained").predict(images[0], top_k=3)
    print(f"{images[0]}: {likeliest.top}")
