"""``idmm probe``: the accuracy of a run's frozen features, in minutes instead of a fine-tuning."""

from dataclasses import replace

from idmm.config.commands import ProbeConfig
from idmm.data.registry import resolve_name
from idmm.files import made_folder, write_json
from idmm.models.spec import ModelSpec
from idmm.progress import log
from idmm.stages.folds import each_fold, over_folds, several
from idmm.stages.probe import frozen_backbone, measure

READOUTS = {"knn": "kNN", "probe": "linear probe"}


def probe(config: ProbeConfig) -> dict:
    """Measure frozen features, print the table and write ``probe.json`` to ``config.out``.

    Returns:
        The content of ``probe.json``, see :class:`idmm.stages.probe.ProbeResult`. With ``data.folds`` the accuracies
        are those over all images, each tested once, and ``folds`` has each fold's measurement.

    Raises:
        UserError: No such run, no labels, a size that the model cannot take, or ``out`` cannot be written.
        RunError: The features are not finite, or memory ran out.
    """
    out = made_folder(config.out)
    data, notes = resolve_name(config.data)
    config = replace(config, data=data)
    backbone = frozen_backbone(config)
    for note in notes:
        log.info("%s", note)
    result = _all_folds(config, backbone.spec) if several(data) else measure(backbone).probe_json()
    print("\n".join(table(result)))
    if out is not None:
        write_json(out / "probe.json", result)
        print(f"written: {out / 'probe.json'}")
    return result


def _all_folds(config: ProbeConfig, spec: ModelSpec) -> dict:
    folds = [measure(frozen_backbone(fold, spec)).probe_json() for fold in each_fold(config)]
    sizes = [fold["test_size"] for fold in folds]
    linear = over_folds([fold["probe"] for fold in folds], sizes)
    return {
        **{name: value for name, value in folds[0].items() if name != "val_size"},
        "knn": {**over_folds([fold["knn"] for fold in folds], sizes), "k": folds[0]["knn"]["k"]},
        "probe": linear,
        "largest_class": linear["largest_class"],
        "test_size": sum(sizes),
        "seconds": round(sum(fold["seconds"] for fold in folds), 1),
        "folds": folds,
    }


def table(result: dict) -> list[str]:
    """Return ``probe.json`` as lines of text."""
    remarks = {}
    if folds := result.get("folds"):
        counts = f"{result['test_size']:,} images, each tested once in {len(folds)} folds"
        for name in READOUTS:
            remarks[name] = f"over folds {result[name]['mean']['top1']:.1f} ± {result[name]['std']['top1']:.1f}"
    else:
        counts = f"{result['train_size']:,} training and {result['test_size']:,} test images"
        remarks["knn"] = f"k = {result['knn']['k']}"
        remarks["probe"] = f"C = {result['probe']['strength']:g}, chosen by {result['probe']['chosen_by']}"
    weights = result["init"] or "fresh weights"
    subject = f"{weights} ({result['model']}, {result['size']} px) on {result['dataset']}"
    largest = f"the largest {result['largest_class']:.1f} % of the test images"
    lines = [f"{subject}: {counts}, {result['num_classes']} classes, {largest}"]
    lines.append(" " * 16 + f"{'top1':<16}{'95 % interval':<16}")
    for name, label in READOUTS.items():
        low, high = result[name]["top1_interval"]
        mean = f", mean over classes {result[name]['mean_per_class']:.1f}" if "mean_per_class" in result[name] else ""
        interval = f"{low:.1f} to {high:.1f}"
        lines.append(f"  {label:<14}{result[name]['top1']:<16.1f}{interval:<16}{remarks[name]}{mean}")
    return lines
