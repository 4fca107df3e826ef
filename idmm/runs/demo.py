"""The demo: ``idmm train`` on digits with few labels, against training from scratch."""

import statistics
from pathlib import Path

import numpy as np
from PIL import Image

from idmm.auto.train import train
from idmm.config import Data, Subset
from idmm.config.commands import DemoConfig, TrainCommand, TrainData
from idmm.data.listing import list_images
from idmm.data.loaders import one_thread
from idmm.errors import RunError
from idmm.files import Json, filling, write_json
from idmm.progress import drawing
from idmm.report import charts as pictures

PER_CLASS = 5  # labelled images
LEAST_GAIN = 2.0  # points


def demo(command: DemoConfig) -> Json:
    """Train on scikit-learn's digits by ``idmm train`` and from scratch for the same time.

    Few digits are labelled. They lie in OUT/images, laid out as a user's folder, and the runs of a
    seed in OUT/seed-SEED. The seed drives everything, also which images keep their label. A stopped
    demo resumes, a finished one prints its result again.

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
    baseline = [state["result"]["baseline_top1"] for state in seeds]
    scratch = [state["scratch"]["top1"] for state in seeds]
    idmm = [state["result"]["top1"] for state in seeds]
    rows = {"baseline": baseline, "from scratch": scratch, "idmm train": idmm}
    better = max(statistics.mean(baseline), statistics.mean(scratch))
    gain = statistics.mean(idmm) - better
    result: Json = {
        "baseline_top1": baseline,
        "scratch_top1": scratch,
        "idmm_top1": idmm,
        "gain": gain,
        "minutes": command.minutes,
    }
    write_json(out / "demo.json", result)
    counts = seeds[0]["counts"]
    tested = seeds[0]["result"]
    title = f"{counts['images']:,} images, {counts['labelled']:,} of them labelled"
    with drawing("comparison.png"):
        pictures.comparison(
            rows, out / "comparison.png", title, tested["largest_class"], grey=["baseline"]
        )
    print(
        f"{title}, {command.minutes:g} min of training each. "
        f"Top-1 on {tested['test_size']} test images:"
    )
    _print_rows(rows, gain)
    print(f"written: {out / 'demo.json'}, {out / 'comparison.png'}")
    print("next, your own images: idmm train DIR --minutes 20 --out runs/x")
    if gain < LEAST_GAIN:
        raise RunError(
            f"demo: {gain:+.1f} points from the better of scratch and baseline, "
            f"expected at least +{LEAST_GAIN:g}. "
            "More minutes help on a slow or busy machine, in a new --out"
        )
    return result


def _print_rows(rows: dict[str, list[float]], gain: float) -> None:
    """Print mean, standard deviation and values of each way, and the gain."""
    for label, values in rows.items():
        spread = ""
        if len(values) > 1:
            spread = f" ± {statistics.stdev(values):.1f}"
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"  {label:<13} {statistics.mean(values):5.1f}{spread} %   ({each})")
    print(f"  lead          {gain:+5.1f} points over the better of both")


def _write_images(folder: Path) -> None:
    if folder.exists():
        return
    with filling(folder) as aside:
        for part, split in list_images(Data(name="digits"), labelled=True).parts.items():
            for number, pixels in enumerate(np.asarray(split.items)):
                folder_of_class = aside / part / str(split.class_name(number))
                folder_of_class.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.squeeze()).save(folder_of_class / f"{number:04d}.png")


def _trained(command: DemoConfig, out: Path, seed: int) -> Json:
    """Return the results of ``idmm train`` with a seed."""
    data = TrainData(root=str(out / "images"), labelled=Subset(per_class=PER_CLASS, seed=seed))
    one = TrainCommand(
        out=str(out / f"seed-{seed}"),
        data=data,
        flip=0.0,  # mirrored digits are no digits
        seed=seed,
        minutes=command.minutes,
        compare=True,
    )
    # steps this small gain nothing from more, and lose much where others use the cores
    with one_thread():
        return train(one)
