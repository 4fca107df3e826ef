"""Are planted duplicates and wrong labels found by `idmm explore`? (docs/explore.md)

    python benchmarks/small_sets.py ... --out sets         its text says where the images come from
    python benchmarks/explore_faults.py --sets sets --out runs/faults

Of the training images of a set (at most --images, evenly drawn) some get a second copy: saved as JPEG of quality 30 to
70, cropped to 80 to 90 % of each side and brought back to the old size, made brighter or darker and of other contrast,
mirrored, or made half or one and a half times as large. Copies keep the class. Of the other images some are moved into
the folder of another class, drawn at random, and a few images of another set are put among them. Then IDMM pretrains a
small network without labels by the recipe of `idmm train` (idmm_fast, resnet10t with 16 to 128 channels, two crops of
35 to 100 % at 32 or 64 px, no colours), and every score is compared with what was planted. Finished runs are kept.

Average precision (AP) needs no threshold; precision and recall are of the lists that the score's own threshold gives.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

SHOWN = ("ap", "precision", "recall")
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


def pretrain(data: Path, out: Path, epochs: int, size: int, seed: int, flip: float) -> None:
    """Pretrains on the images by the recipe of ``idmm train``."""
    flags = {
        "config": "idmm_fast", "data.root": data, "out": out, "seed": seed, "data.workers": 0, "train.epochs": epochs,
        "train.batch_size": 32, "train.lr": 2e-3, "train.precision": "fp32", "train.device": "cpu",
        "model.name": "resnet10t", "model.kwargs": "{channels: [16, 32, 64, 128]}", "views.size": size,
        "views.flip": flip, "views.crops": "[{count: 2, scale: [0.35, 1.0]}]", "views.jitter_prob": 0,
        "views.grey_prob": 0, "views.blur_prob": 0, "method.cutmix_alpha": 0,
    }  # fmt: skip
    subprocess.run([sys.executable, PRETRAIN, *(f"--{key}={value}" for key, value in flags.items())], check=True)


# ---------------------------------------------------------------------- measuring
def measured(data: Path, run: Path) -> dict:
    """Returns the figures of each score for duplicates and labels."""
    from idmm.config.usage import ExploreConfig
    from idmm.data.images import resized
    from idmm.evaluation.similarity import label_margins, likely_duplicates, nearest, unit_rows
    from idmm.inference.explore import HASHES, features, hash_vectors, opened
    from idmm.stages.artifacts import config_of

    faults, given, config = json.loads((data / "faults.json").read_text()), ExploreConfig(run=str(run)), config_of(run)
    seen = opened(given, config)
    place = {name: i for i, name in enumerate(seen.store.names)}
    kinds = {tuple(sorted((place[one], place[two]))): kind for one, two, kind in faults["copies"]}
    moved = np.array([name in faults["moved"] for name in seen.store.names])
    strange = np.array([name in faults["strangers"] for name in seen.store.names])
    hashes = hash_vectors(seen.store)
    images = (seen.store.image(i).permute(1, 2, 0).numpy() for i in range(len(place)))
    thumbs = [resized(image, 32, 32, Image.Resampling.BOX) for image in images]
    pixels = unit_rows(np.array(thumbs, dtype=np.float32).reshape(len(place), -1))
    frozen = unit_rows(features(given, config, seen.store))
    forms = {"rows": unit_rows(seen.rows), "features": frozen, "raw pixels": pixels}
    pairs = {}
    for name, unit in forms.items():
        pairs |= {f"{name}, hash": likely_duplicates(np.hstack([unit, hashes])), name: likely_duplicates(unit)}
    table = {name: _of_pairs(found.index, found.score, found.score > found.threshold, kinds)
             for name, found in pairs.items()}  # fmt: skip
    agreement = hashes @ hashes.T / HASHES
    every = np.stack(np.triu_indices(len(place), 1), axis=1)
    scores = agreement[every[:, 0], every[:, 1]]
    order = np.argsort(-scores, kind="stable")
    table["perceptual hash, 4 bits"] = _of_pairs(every[order], scores[order], scores[order] >= 1 - 2 * 4 / 64, kinds)
    table["idmm data check"] = _of_check(data, place, kinds)
    labels = {}
    for name, unit in forms.items():
        margins, _ = label_margins(nearest(unit, 30), seen.labels)
        labels[name] = _of_images(margins[~strange], moved[~strange])
    sizes = {"images": len(place), "copies": len(kinds), "moved": int(moved.sum()), "strangers": int(strange.sum())}
    return {"sizes": sizes, "duplicates": table, "labels": labels}


def _average_precision(hits: np.ndarray, total: int) -> float:
    """Of hits in the order of the score; those that are not in the list count as never found."""
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1) * hits).sum() / total)


def _of_pairs(index: np.ndarray, score, listed: np.ndarray, kinds: dict) -> dict:
    hits = np.array([(i, j) in kinds for i, j in index.tolist()], dtype=bool)
    found = {tuple(pair) for pair in index[listed].tolist()}
    named = {kind: float(np.mean([pair in found for pair in kinds if kinds[pair] == kind])) for kind in KINDS}
    precision = float(hits[listed].mean()) if listed.any() else None
    shares = {"precision": precision, "recall": float(hits[listed].sum() / len(kinds)), "listed": int(listed.sum())}
    return {**({} if score is None else {"ap": _average_precision(hits, len(kinds))}), **shares, "by_kind": named}


def _of_check(data: Path, place: dict, kinds: dict) -> dict:
    from idmm import config
    from idmm.data.doctor import check

    found, _ = check(config.Data(name="folder", root=str(data)))
    index = np.array([sorted((place[pair.first.name], place[pair.second.name])) for pair in found.pairs])
    return _of_pairs(index, None, np.ones(len(index), dtype=bool), kinds)


def _of_images(margins: np.ndarray, wrong: np.ndarray) -> dict:
    from idmm.evaluation.similarity import LIKELY

    listed = margins > LIKELY
    shares = {"precision": float(wrong[listed].mean()), "recall": float(listed[wrong].mean())}
    shares["listed"] = int(listed.sum())
    return {"ap": _average_precision(wrong[np.argsort(-margins, kind="stable")], wrong.sum()), **shares}


def report(results: dict) -> str:
    """Returns Markdown tables: AP, then precision / recall of what is listed (percent), each the mean over seeds."""
    sets = sorted({key.rpartition("-")[0] for key in results})
    lines = []
    for kind in ("duplicates", "labels"):
        lines += ["", f"| {kind} | " + " | ".join(sets) + " |", "|---|" + "---|" * len(sets)]
        for score in next(iter(results.values()))[kind]:
            cells = []
            for name in sets:
                runs = [found[kind][score] for key, found in results.items() if key.rpartition("-")[0] == name]
                cells.append(_cell({of: np.mean([run[of] or 0 for run in runs]) for of in runs[0] if of in SHOWN}))
            lines.append(f"| {score} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: dict) -> str:
    shares = f"{100 * values['precision']:.0f} / {100 * values['recall']:.0f}" if "precision" in values else ""
    return ", ".join(filter(None, [f"{values['ap']:.2f}" if "ap" in values else "", shares]))


def main() -> None:
    """Plants, pretrains and measures all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=["photos", "stamps", "fashion"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = {}
    for seed in args.seeds:
        for name in args.names:
            data, run = args.out / f"{name}-{seed}", args.out / f"{name}-{seed}-resnet"
            if not (data / "faults.json").exists():
                plant(args.sets, name, args.images, seed, data)
            flip = 0.0 if name in ("digits", "speech") else 0.5
            pretrain(data, run, args.epochs, SIZES[name], seed, flip)
            results[f"{name}-{seed}"] = measured(data, run)
            (args.out / "faults.json").write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
