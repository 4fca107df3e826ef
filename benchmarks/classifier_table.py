"""The N-way layer's table (docs/pretrain.md): digits, six layers, several seeds.

    python benchmarks/classifier_table.py --out runs/classifier_table --seeds 3

Each cell pretrains a small ViT on scikit-learn's digits for 40 epochs and measures its frozen
features on the test split: kNN (k = 20, all training images as the bank) and a linear probe with 10
labels per class (mean over 5 draws). Finished cells are skipped: repeat the command to resume.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from side_by_side import head, mean_and_spread, row

CUTMIX = {"cutmix_alpha": 0.5}
FAST = {"classifier": "cosine", "classifier_lr_scale": 10.0, "classifier_init": "features"}
ROWS = {
    "untrained": None,
    "linear": {},
    "linear, lr x10": {"classifier_lr_scale": 10.0},
    "cosine": {"classifier": "cosine"},
    "cosine, lr x10": {"classifier": "cosine", "classifier_lr_scale": 10.0},
    "cosine, lr x10, from features": FAST,
    "the last with CutMix": FAST | CUTMIX,
}
KWARGS = {
    "patch_size": 8,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
    "global_pool": "avg",
    "class_token": False,
}
SIZE = 32
# Digits are 8x8: the paper's views (crops of 5 % of the area, blur, flips) teach nothing in 40
# epochs.
VIEWS = {
    "size": SIZE,
    "crops": [{"count": 2, "scale": [0.3, 1.0]}],
    "jitter": [0.4, 0.4, 0.0, 0.0],
    "flip": 0.0,
    "grey_prob": 0.0,
    "blur_prob": 0.0,
}


def cell(method: dict | None, seed: int, epochs: int, out: Path) -> dict:
    """Train one cell and measures its features."""
    import idmm

    model = {"name": "vit_tiny_patch16_224", "kwargs": KWARGS, "drop_path": 0.0}
    config = {
        "out": str(out),
        "seed": seed,
        "data": {"name": "digits", "workers": 0},
        "model": model,
        "views": VIEWS,
        "train": {
            "epochs": epochs,
            "batch_size": 32,
            "lr": 3e-3,
            "precision": "fp32",
            "device": "cpu",
        },
        "method": {"cutmix_alpha": 0.0, **(method or {})},
    }
    if method is None:
        from idmm.config import PretrainConfig
        from idmm.config.parsing import build
        from idmm.runs.resolve import resolve_pretrain

        backbone = resolve_pretrain(build(PretrainConfig, config)).spec.build(SIZE, seed).eval()
    else:
        idmm.pretrain(config)
        backbone = idmm.load_backbone(out)
    return measure(backbone)


def measure(backbone) -> dict:
    """kNN and probe accuracy of the pooled features on digits' test split (percent)."""
    from idmm import config
    from idmm.data.image_store import store_split
    from idmm.data.images import CentreCrop
    from idmm.data.listing import list_images
    from idmm.data.loaders import centre_crops
    from idmm.evaluation import evaluate
    from idmm.evaluation.network import extract_features

    splits = list_images(config.Data(name="digits"), labelled=True)
    features = []
    for split in (splits.train, splits.test):
        store = store_split(split, stored_size=None, data=config.Data(name="digits"))
        crop = CentreCrop(SIZE, 0.875)
        batches = centre_crops(
            store, crop, config.IMAGENET_MEAN, config.IMAGENET_STD, 256, workers=0
        )
        features.append(extract_features(backbone, batches, "cpu").numpy())
    (train, test), labels, truth = features, splits.train.labels, splits.test.labels
    probes = []
    for draw in range(5):
        rng = np.random.default_rng(draw)
        some = np.concatenate(
            [rng.permutation(np.flatnonzero(labels == c))[:10] for c in range(10)]
        )
        predicted = evaluate.probe_predict(train[some], labels[some], test)
        probes.append(100 * float(np.mean(predicted == truth)))
    knn = evaluate.score(evaluate.knn_predict(train, labels, test), truth)["top1"]
    return {"knn": knn, "probe": float(np.mean(probes))}


def table(out: Path, seeds: int) -> str:
    """Return the cells as a Markdown table, mean and standard deviation over seeds."""
    lines = [head("N-way layer", "kNN", "probe, 10 labels per class")]
    for name in ROWS:
        cells = [
            json.loads(f.read_text()) for s in range(seeds) if (f := _file(out, name, s)).exists()
        ]
        if cells:
            values = [[each[column] for each in cells] for column in ("knn", "probe")]
            lines.append(row(name, *(mean_and_spread(column) for column in values)))
    return "\n".join(lines)


def _file(out: Path, row: str, seed: int) -> Path:
    return out / f"{row.replace(', ', '-').replace(' ', '_')}-{seed}.json"


def main() -> None:
    """Run the missing cells and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/classifier_table"), help="folder for the cells"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row")
    parser.add_argument("--epochs", type=int, default=40, help="epochs a cell")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name, method in ROWS.items():
            file = _file(args.out, name, seed)
            if not file.exists():
                file.write_text(json.dumps(cell(method, seed, args.epochs, file.with_suffix(""))))
    print(table(args.out, args.seeds))


if __name__ == "__main__":
    main()
