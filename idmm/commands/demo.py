"""The demo: five labelled digits a class and many without labels, by ``idmm train``, against training from scratch."""

import statistics
from pathlib import Path

from idmm.commands.crops import crop_blocks
from idmm.commands.train import train
from idmm.config import Data
from idmm.config.commands import DemoConfig, TrainCommand
from idmm.data.datasets import open_splits
from idmm.data.loaders import one_thread
from idmm.errors import RunError
from idmm.files import filling, json_lines, write_json
from idmm.pictures import curves_figure, save
from idmm.report import pictures
from idmm.report.sheets import caption_sheet
from idmm.stages import STAGES, artifacts

PICTURES = ("loss.png", "crops.png", "comparison.png")
ROWS = {"raw pixels": "pixel_knn", "from scratch": "scratch_top1", "idmm train": "idmm_top1"}
PARTS = {"idmm train": ".", "from scratch": "scratch", "IDMM": "stage1"}  # of a seed's folder, as in loss.png
EACH = 5  # labelled images of a class
LEAST_GAIN = 5.0  # points


def demo(given: DemoConfig) -> dict:
    """Trains on scikit-learn's digits, few of them labelled, as ``idmm train`` does it, and from scratch for as long.

    The digits lie in OUT/images as one's own images would, the runs of a seed in OUT/seed-SEED. The seed drives
    everything, which images are labelled, too. A demo that was stopped goes on, a finished one says its result again.

    Returns:
        What ``demo.json`` holds: ``idmm_top1``, ``scratch_top1`` and ``pixel_knn`` (percent of the test images, one a
        seed), ``largest_class`` (its share of them), ``gain`` (of the means, in points, over the better of scratch and
        pixels), ``minutes`` of each training, and image counts.

    Raises:
        UserError: A mistake in the flags.
        RunError: The gain is below 5 points, or a run could not go on.
    """
    out = Path(given.out)
    _write_images(out / "images")
    seeds = [_trained(given, out, seed) for seed in range(given.seeds)]
    result = _summary(given, seeds)
    _draw(out, result)
    write_json(out / "demo.json", result)
    _say(out, result)
    if result["gain"] < LEAST_GAIN:
        raise RunError(
            f"demo: {result['gain']:+.1f} points from the better of scratch and raw pixels, wanted at least +"
            f"{LEAST_GAIN:g}; more minutes help on a slow or busy machine, in a new --out"
        )
    return result


def _write_images(folder: Path) -> None:
    if folder.exists():
        return
    from PIL import Image

    with filling(folder) as aside:
        for part, split in open_splits(Data(name="digits"), labelled=True).parts.items():
            for number, (pixels, label) in enumerate(zip(split.items, split.labels, strict=True)):
                place = aside / part / split.classes[label]
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.squeeze()).save(place / f"{number:04d}.png")


def _trained(given: DemoConfig, out: Path, seed: int) -> dict:
    """Returns what ``idmm train`` found with a seed."""
    data = Data(root=str(out / "images"), labelled={"per_class": EACH, "seed": seed})
    more = {"flip": 0.0, "seed": seed, "minutes": given.minutes, "compare": True}  # mirrored digits are no digits
    with one_thread():  # steps this small gain nothing from more, and lose much where others use the cores
        return train(TrainCommand(out=str(_folder(out, seed)), data=data, **more))


def _folder(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}"


def _summary(given: DemoConfig, seeds: list[dict]) -> dict:
    found = {
        "idmm_top1": [kept["result"]["top1"] for kept in seeds],
        "scratch_top1": [kept["scratch"]["top1"] for kept in seeds],
        "pixel_knn": [kept["scratch"]["pixel_knn"] for kept in seeds],
    }
    means = {name: statistics.mean(values) for name, values in found.items()}
    counts, result = seeds[0]["counts"], seeds[0]["result"]
    return found | {
        "gain": means["idmm_top1"] - max(means["scratch_top1"], means["pixel_knn"]),
        "minutes": given.minutes,
        "images": counts["images"],
        "labelled_images": counts["labelled"],
        "test_images": result["test_size"],
        "num_classes": result["num_classes"],
        "largest_class": result["largest_class"],
    }


def _title(result: dict) -> str:
    return f"{result['images']:,} images, {result['labelled_images']:,} of them labelled"


def _draw(out: Path, result: dict) -> None:
    """Draws the losses, the crops that IDMM of seed 0 tells apart, and the comparison."""
    from idmm.stages.assemble import assemble, load_splits

    folders = [_folder(out, seed) for seed in range(len(result["idmm_top1"]))]
    curves = {}
    for label, part in PARTS.items():
        name = "loss of IDMM" if label == "IDMM" else "loss of the classifier"  # the two share no panel
        read = [json_lines(folder / part / "metrics.jsonl") for folder in folders]
        curves[label] = [[{name: one["loss"]} for one in seed] for seed in read]
    save(curves_figure(curves, _title(result)), out / "loss.png")

    config = STAGES["pretrain"].resolve(artifacts.begun_config(folders[0] / "stage1"))[0]
    parts = assemble(config)
    norm = dict(mean=parts.spec.mean, std=parts.spec.std, cutmix_alpha=config.method.cutmix_alpha)
    rows = crop_blocks(load_splits(parts).train, config.views, **norm)
    caption_sheet(rows, out / "crops.png", "Images and the crops that IDMM tells apart")

    scores = {label: result[name] for label, name in ROWS.items()}
    title = f"{_title(result)}:\n{result['gain']:+.1f} points over the better of the others"
    pictures.comparison(
        scores, out / "comparison.png", title, one_class=result["largest_class"], untaught=["raw pixels"]
    )


def _say(out: Path, result: dict) -> None:
    count = len(result["idmm_top1"])
    print(
        f"{_title(result)}; {result['minutes']:g} min of training each; top-1 on {result['test_images']} test "
        f"images, {count} seed{'' if count == 1 else 's'}:"
    )
    for label, name in ROWS.items():
        values = result[name]
        spread = f" ± {statistics.stdev(values):.1f}" if count > 1 else ""
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"  {label:<13} {statistics.mean(values):5.1f}{spread} %   ({each})")
    print(f"  gain          {result['gain']:+5.1f} points")
    print(f"{out / 'demo.json'} and {', '.join(PICTURES)} beside it")
