"""The demo: five labelled digits a class and many without labels, by ``idmm train``, against
training from scratch."""

import statistics
from pathlib import Path

from PIL import Image

from idmm.auto.train import train
from idmm.config import Data
from idmm.config.commands import DemoConfig, TrainCommand, TrainData
from idmm.data.listing import list_images
from idmm.data.loaders import one_thread
from idmm.errors import RunError
from idmm.files import filling, write_json
from idmm.progress import drawing
from idmm.report import charts as pictures

WAYS = ("baseline", "from scratch", "idmm train")
EACH = 5  # labelled images of a class
LEAST_GAIN = 2.0  # points


def demo(command: DemoConfig) -> dict:
    """Train on scikit-learn's digits, few of them labelled, by ``idmm train`` and from scratch for
    the same time.

    The digits are in OUT/images, laid out as a user's folder, and the runs of a seed in
    OUT/seed-SEED. The seed drives everything, also which images keep their label. A stopped demo
    resumes, a finished one prints its result again.

    Returns:
        The content of ``demo.json``: ``idmm_top1``, ``scratch_top1`` and ``baseline_top1`` (percent
        of the test images, one per seed), ``gain`` (of the means, in points, over the better of
        scratch and baseline), ``minutes`` of each training.

    Raises:
        UserError: A mistake in the flags.
        RunError: The gain is below 2 points, or a run failed.
    """
    out = Path(command.out)
    _write_images(out / "images")
    seeds = [_trained(command, out, seed) for seed in range(command.seeds)]
    result = {
        "baseline_top1": [state["result"]["baseline_top1"] for state in seeds],
        "scratch_top1": [state["scratch"]["top1"] for state in seeds],
        "idmm_top1": [state["result"]["top1"] for state in seeds],
    }
    rows = dict(zip(WAYS, result.values(), strict=True))
    *others, ours = map(statistics.mean, rows.values())
    result |= {"gain": ours - max(others), "minutes": command.minutes}
    write_json(out / "demo.json", result)
    counts = seeds[0]["counts"]
    tested = seeds[0]["result"]
    title = f"{counts['images']:,} images, {counts['labelled']:,} of them labelled"
    with drawing("comparison.png"):
        pictures.comparison(
            rows, out / "comparison.png", title, tested["largest_class"], grey=["baseline"]
        )
    print(
        f"{title}, {command.minutes:g} min of training each. Top-1 on {tested['test_size']} test images:"
    )
    for label, values in rows.items():
        if len(values) > 1:
            spread = f" ± {statistics.stdev(values):.1f}"
        else:
            spread = ""
        print(
            f"  {label:<13} {statistics.mean(values):5.1f}{spread} %   ({', '.join(f'{v:.1f}' for v in values)})"
        )
    print(f"  lead          {result['gain']:+5.1f} points over the better of both")
    print(f"written: {out / 'demo.json'}, {out / 'comparison.png'}")
    print("next, your own images: idmm train DIR --minutes 20 --out runs/x")
    if result["gain"] < LEAST_GAIN:
        raise RunError(
            f"demo: {result['gain']:+.1f} points from the better of scratch and baseline, expected at least +"
            f"{LEAST_GAIN:g}. More minutes help on a slow or busy machine, in a new --out"
        )
    return result


def _write_images(folder: Path) -> None:
    if folder.exists():
        return
    with filling(folder) as aside:
        for part, split in list_images(Data(name="digits"), labelled=True).parts.items():
            for number, (pixels, label) in enumerate(zip(split.items, split.labels, strict=True)):
                place = aside / part / split.classes[label]
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.squeeze()).save(place / f"{number:04d}.png")


def _trained(command: DemoConfig, out: Path, seed: int) -> dict:
    """Return the results of ``idmm train`` with a seed."""
    data = TrainData(root=str(out / "images"), labelled={"per_class": EACH, "seed": seed})
    # mirrored digits are no digits
    more = {"flip": 0.0, "seed": seed, "minutes": command.minutes, "compare": True}
    # steps this small gain nothing from more, and lose much where others use the cores
    with one_thread():
        return train(TrainCommand(out=str(out / f"seed-{seed}"), data=data, **more))
