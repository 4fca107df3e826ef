"""A backbone measured as it is, in minutes: kNN and a linear probe of its frozen features."""

import tempfile
import time
from dataclasses import replace

from idmm.config import parsing
from idmm.config.commands import ProbeConfig
from idmm.data.registry import spec_of
from idmm.data.store import Stores
from idmm.evaluation.evaluate import readouts
from idmm.evaluation.network import Network
from idmm.progress import aligned, log
from idmm.runs import common
from idmm.runs.outputs import largest_class, remarks
from idmm.runs.resolve import run_stage
from idmm.training.device import pick_device
from idmm.training.run_folder import RunFolder
from idmm.training.stage import RunSetup

READOUTS = {"knn": "kNN", "probe": "linear probe"}


def command(config: ProbeConfig) -> str:
    """Measure frozen features and return the table, see :func:`probe`."""
    return "\n".join(table(probe(config)))


def probe(config: ProbeConfig | dict | str) -> dict:
    """Measure a frozen backbone and write ``result.json`` to ``config.out``, a folder like any
    other run's, if given.

    Args:
        config: A ProbeConfig, a mapping of its keys ('idmm probe --help'), or the name of a YAML
            file or recipe.

    Returns:
        The content of ``result.json``: ``top1`` (the linear probe's) and ``knn`` in percent,
        ``top5`` None, ``mean_per_class`` (the probe's) if the dataset's literature reports it,
        ``largest_class``, image counts, ``seed``, ``seconds``, and both ``readouts`` with
        intervals.

    Raises:
        UserError: No such run, no labels, or a size that the model cannot take.
        RunError: The features are not finite, or memory ran out.
    """
    config = parsing.build(ProbeConfig, config)
    if config.out:
        return run_stage(config)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # nothing is to be left
        return run_stage(replace(config, out=folder))


def run_one(setup: RunSetup) -> dict:
    """Measure a backbone by a resolved config, on one split of the images. Otherwise as
    :func:`probe`."""
    config = setup.config
    spec = setup.spec
    common.check_sizes(setup)
    folder = RunFolder(config.out, config, "auto")
    with common.open_folder(setup, folder):
        if folder.finished:
            return folder.result()
        started_at = time.monotonic()
        setup, images = common.store_run_images(setup, setup.stage.list_images(), folder)
        network = build_network(setup, config.init or spec.name)
        result = measure(setup, network, images)
        result["seconds"] = round(time.monotonic() - started_at, 1)
        folder.finish(result)
        return result


def build_network(setup: RunSetup, label: str) -> Network:
    """Build the frozen backbone of a probe with its weights and preprocessing. Messages begin with
    ``label``.

    Raises:
        UserError: The weights do not fit.
    """
    config = setup.config
    spec = setup.spec
    device = pick_device(setup.config.device)
    model = spec.build(config.size, config.seed)
    if report := spec.load(model):
        log.info("%s", report)
    preprocessing = (config.size, config.crop_pct, spec.mean, spec.std)
    return Network(model.eval().to(device), *preprocessing, device, config.batch_size, label)


def about(setup: RunSetup) -> dict:
    """Return the backbone's entries in results. With fresh weights ``init`` is None."""
    return {"init": setup.config.init, "model": setup.spec.name, "size": setup.config.size}


def measure(setup: RunSetup, network: Network, images: Stores) -> dict:
    """Measure frozen features by kNN and a linear probe; return the result without its
    ``seconds``."""
    config = setup.config
    truth = images.test.labels
    classes = images.train.classes
    features = {
        part: (network.split_features(store, config.data.workers, part), store.labels)
        for part, store in images.parts.items()
    }
    measured = readouts(
        *features["train"],
        *features["test"],
        seed=config.seed,
        val=features.get("val"),
        metric=spec_of(config.data.name).metric,
        groups=images.train.groups,
        test_groups=images.test.groups,
        classes=classes,
        counted=config.data.fold is not None,
    )
    knn = measured["knn"]
    linear = measured["probe"]
    result = {
        "top1": linear["top1"],
        "top5": None,
        "knn": knn["top1"],
        **{
            name: linear[name]
            for name in ("mean_per_class", "per_class", "per_group")
            if name in linear
        },
        "largest_class": largest_class(truth),
        **about(setup),
        "precision": "fp32",
        "crop_pct": config.crop_pct,
        "dataset": config.data.name,
        "num_classes": len(classes),
        **{f"{part}_size": len(store) for part, store in images.parts.items()},
        **images.remarks,
        "seed": config.seed,
        "readouts": {"probe": linear, "knn": knn},
    }
    if images.test.groups is not None:
        result["test_groups"] = len(set(images.test.groups))
    for line in remarks(result | linear):
        log.warning("linear probe: %s", line)
    return result


def table(result: dict) -> list[str]:
    """Return ``result.json`` of a probe as lines of text."""
    folds = result.get("folds")
    first = folds[0] if folds else result
    counts = f"{result['train_size']:,} training and {result['test_size']:,} test images"
    if folds:
        counts = f"{result['test_size']:,} images, each tested once in {len(folds)} folds"
    subject = f"{first['init'] or 'fresh weights'} ({first['model']}, {first['size']} px) on {first['dataset']}"
    largest = f"the largest {result['largest_class']:.1f} % of the test images"
    lines = [f"{subject}: {counts}, {result['num_classes']} classes, {largest}"]
    if folds:
        low, high = result["top1_interval"]
        spread = f"mean ± standard deviation over folds {result['mean']['top1']:.1f} ± {result['std']['top1']:.1f}"
        lines.append(f"  kNN {result['knn']:.1f}")
        return [
            *lines,
            f"  linear probe {result['top1']:.1f}, 95 % interval {low:.1f} to {high:.1f}, {spread}",
        ]
    knn, linear = (result["readouts"][name] for name in READOUTS)
    remarks = [f"k = {knn['k']}", f"C = {linear['strength']:g}, chosen by {linear['chosen_by']}"]
    rows = [["", "top1", "95 % interval", ""]]
    for label, readout, remark in zip(READOUTS.values(), (knn, linear), remarks, strict=True):
        interval = "{:.1f} to {:.1f}".format(*readout["top1_interval"])
        if "mean_per_class" in readout:
            mean = f", mean over classes {readout['mean_per_class']:.1f}"
        else:
            mean = ""
        rows.append([label, f"{readout['top1']:.1f}", interval, remark + mean])
    return [*lines, *(f"  {line}" for line in aligned(rows))]
