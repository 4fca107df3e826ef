"""``idmm probe``: the accuracy of a run's frozen features, in minutes instead of a fine-tuning."""

import tempfile
from dataclasses import replace

from idmm.config.commands import ProbeConfig
from idmm.stages.probe import probe as measure

READOUTS = {"knn": "kNN", "probe": "linear probe"}


def probe(config: ProbeConfig) -> dict:
    """Measure frozen features and print the table. With ``config.out`` this folder is a run like any other.

    Returns:
        The return value of :func:`idmm.stages.probe.probe`, whose errors it raises.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = measure(replace(config, out=config.out or folder))
    print("\n".join(table(result)))
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
        spread = f"over folds {result['mean']['top1']:.1f} ± {result['std']['top1']:.1f}"
        lines.append(f"  kNN {result['knn']:.1f}")
        return [*lines, f"  linear probe {result['top1']:.1f}, 95 % interval {low:.1f} to {high:.1f}, {spread}"]
    knn, linear = (result["readouts"][name] for name in READOUTS)
    remarks = [f"k = {knn['k']}", f"C = {linear['strength']:g}, chosen by {linear['chosen_by']}"]
    lines.append(" " * 16 + f"{'top1':<16}{'95 % interval':<16}")
    for label, readout, remark in zip(READOUTS.values(), (knn, linear), remarks, strict=True):
        low, high = readout["top1_interval"]
        mean = f", mean over classes {readout['mean_per_class']:.1f}" if "mean_per_class" in readout else ""
        interval = f"{low:.1f} to {high:.1f}"
        lines.append(f"  {label:<14}{readout['top1']:<16.1f}{interval:<16}{remark}{mean}")
    return lines
