"""A backbone measured as it is, in minutes: kNN and a linear probe of its frozen features."""

import functools
import time
from typing import Any

from idmm.config.commands import ProbeConfig
from idmm.data.registry import spec_of
from idmm.data.store import Stores
from idmm.evaluation.baseline import largest_class, remarks
from idmm.evaluation.evaluate import readouts
from idmm.evaluation.network import Network
from idmm.models.hog import Hog
from idmm.progress import aligned, log
from idmm.runs.images import list_run_images
from idmm.runs.networks import try_sizes
from idmm.training.device import pick_device
from idmm.training.run import Run

READOUTS = {"knn": "kNN", "probe": "linear probe"}


def measure_backbone(run: Run[ProbeConfig]) -> dict[str, Any]:
    """Measure on one split of the images. Return the content of ``result.json``."""
    list_images = functools.partial(list_run_images, run.config)
    try_sizes(run)
    with run.opened_folder():
        if run.folder.finished:
            return run.finished_result(list_images)
        started_at = time.monotonic()
        images = run.store(list_images(), run.folder)
        network = build_network(run, run.config.init or run.spec.name)
        result = measure(run, network, images)
        result["seconds"] = round(time.monotonic() - started_at, 1)
        run.folder.write_result(result)
        return result


def build_network(run: Run[ProbeConfig], label: str) -> Network:
    """Build the frozen backbone of a probe with its weights and preprocessing.

    Messages begin with ``label``.

    Raises:
        UserError: The weights do not fit.
    """
    config = run.config
    spec = run.spec
    assert config.size is not None  # of a resolved config
    device = pick_device(config.device)
    model = spec.build(config.size, config.seed)
    report = spec.load(model)
    if report is not None:
        log.info(str(report))
    network = Network(
        model.eval().to(device),
        config.size,
        config.crop_pct,
        run.mean,
        run.std,
        device,
        config.batch_size,
        label,
        crop_mode=run.crop_mode,
    )
    return network.in_precision(config.precision)


def backbone_entries(run: Run[ProbeConfig]) -> dict[str, Any]:
    """Return the backbone's entries in results. With fresh weights ``init`` is None."""
    return {"init": run.config.init, "model": run.spec.name, "size": run.config.size}


def measure(run: Run[ProbeConfig], network: Network, images: Stores) -> dict[str, Any]:
    """Measure features by kNN and a linear probe; return the result without ``seconds``."""
    config = run.config
    classes = images.train.class_names
    test = images.tested
    features = {}
    for part, store in images.parts.items():
        rows = network.split_features(store, config.data.workers, part)
        features[part] = (rows, store.known_labels)
    measured = readouts(
        *features["train"],
        *features["test"],
        seed=config.seed,
        val=features.get("val"),
        metric=spec_of(config.data.name).metric,
        groups=images.train.groups,
        test_groups=test.groups,
        classes=classes,
        counted=config.data.fold is not None,
        one_scale=type(network.model) is Hog,
    )
    knn = measured["knn"]
    linear = measured["probe"]
    result: dict[str, Any] = {"top1": linear["top1"], "top5": None, "knn": knn["top1"]}
    for name in ("mean_per_class", "per_class", "per_group"):
        if name in linear:
            result[name] = linear[name]
    result |= {"largest_class": largest_class(test.known_labels), **backbone_entries(run)}
    result |= {
        "precision": network.precision,
        "crop_pct": config.crop_pct,
        "crop_mode": run.crop_mode,
        "dataset": config.data.name,
    }
    result["num_classes"] = len(classes)
    for part, store in images.parts.items():
        result[f"{part}_size"] = len(store)
    result |= images.remarks
    result |= {"seed": config.seed, "readouts": {"probe": linear, "knn": knn}}
    if test.groups is not None:
        result["test_groups"] = len(set(test.groups))
    for remark in remarks(result | linear):
        log.warning(f"linear probe: {remark}")
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Return ``result.json`` of a probe as lines of text."""
    folds = result.get("folds")
    if folds:
        return _table_of_folds(result, folds)
    counts = f"{result['train_size']:,} training and {result['test_size']:,} test images"
    rows = [["", "top1", "95 % interval", ""]]
    for name, label in READOUTS.items():
        readout = result["readouts"][name]
        if name == "knn":
            remark = f"k = {readout['k']}"
        else:
            remark = f"C = {readout['strength']:g}, chosen by {readout['chosen_by']}"
        if "mean_per_class" in readout:
            remark += f", mean over classes {readout['mean_per_class']:.1f}"
        low, high = readout["top1_interval"]
        rows.append([label, f"{readout['top1']:.1f}", f"{low:.1f} to {high:.1f}", remark])
    return [_subject(result, result, counts), *(f"  {line}" for line in aligned(rows))]


def _table_of_folds(result: dict[str, Any], folds: list[dict[str, Any]]) -> list[str]:
    counts = f"{result['test_size']:,} images, each tested once in {len(folds)} folds"
    low, high = result["top1_interval"]
    mean = result["mean"]["top1"]
    std = result["std"]["top1"]
    return [
        _subject(result, folds[0], counts),
        f"  kNN {result['knn']:.1f}",
        f"  linear probe {result['top1']:.1f}, 95 % interval {low:.1f} to {high:.1f}, "
        f"mean ± standard deviation over folds {mean:.1f} ± {std:.1f}",
    ]


def _subject(result: dict[str, Any], first: dict[str, Any], counts: str) -> str:
    """Return the table's first line. ``first`` has the network: the result or the first fold."""
    weights = first["init"] or "fresh weights"
    network = f"{weights} ({first['model']}, {first['size']} px)"
    largest = f"the largest {result['largest_class']:.1f} % of the test images"
    return f"{network} on {first['dataset']}: {counts}, {result['num_classes']} classes, {largest}"
