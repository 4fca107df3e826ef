"""``idmm probe``: how good the frozen features of a run are, in minutes instead of a fine-tuning."""

from dataclasses import replace

from idmm.config.commands import ProbeConfig
from idmm.data.registry import resolve_name
from idmm.files import made_folder, write_json
from idmm.models.spec import ModelSpec
from idmm.progress import log
from idmm.stages.folds import each_fold, over_folds, several
from idmm.stages.probe import frozen_backbone, measure


def probe(config: ProbeConfig) -> dict:
    """Measures frozen features, prints the table and writes ``probe.json`` to ``config.out``.

    Returns:
        What ``probe.json`` holds, see :func:`idmm.stages.probe.measure`; of ``data.folds`` the accuracies of both
        readouts over all images, each tested once, and ``folds``: what each fold's measurement gave.

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
    result = _all_folds(config, backbone.spec) if several(data) else measure(backbone)
    print("\n".join(table(result)))
    if out is not None:
        write_json(out / "probe.json", result)
        print(f"written: {out / 'probe.json'}")
    return result


def _all_folds(config: ProbeConfig, spec: ModelSpec) -> dict:
    found = [measure(frozen_backbone(one, spec)) for one in each_fold(config)]
    sizes = [one["test_size"] for one in found]
    probe = over_folds([one["probe"] for one in found], sizes)
    return {
        **{name: value for name, value in found[0].items() if name != "val_size"},
        "knn": {**over_folds([one["knn"] for one in found], sizes), "k": found[0]["knn"]["k"]},
        "probe": probe,
        "largest_class": probe["largest_class"],
        "test_size": sum(sizes),
        "seconds": round(sum(one["seconds"] for one in found), 1),
        "folds": found,
    }


def table(result: dict) -> list[str]:
    """Returns ``probe.json`` as lines of text."""
    if folds := result.get("folds"):
        counts = f"{result['test_size']:,} images, each tested once in {len(folds)} folds"
        spread = {name: (result[name]["mean"]["top1"], result[name]["std"]["top1"]) for name in ("knn", "probe")}
        remarks = {name: f"over folds {mean:.1f} ± {std:.1f}" for name, (mean, std) in spread.items()}
    else:
        counts = f"{result['train_size']:,} training and {result['test_size']:,} test images"
        chosen = f"C = {result['probe']['strength']:g}, chosen by {result['probe']['chosen_by']}"
        remarks = {"knn": f"k = {result['knn']['k']}", "probe": chosen}
    weights = result["init"] or "no weights to start from"
    where = f"{weights} ({result['model']}, {result['size']} px) on {result['dataset']}"
    largest = f"the largest {result['largest_class']:.1f} % of the test images"
    lines = [f"{where}: {counts}, {result['num_classes']} classes, {largest}"]
    metrics = [name for name in ("top1", "mean_per_class") if f"{name}_interval" in result["probe"]]
    lines.append(" " * 16 + "".join(f"{name:<16}{'95 % interval':<16}" for name in metrics))
    for name, label in (("knn", "kNN"), ("probe", "linear probe")):
        cells = [(f"{result[name][m]:.1f}", result[name][f"{m}_interval"]) for m in metrics]
        shown = "".join(f"{value:<16}{f'{low:.1f} to {high:.1f}':<16}" for value, (low, high) in cells)
        lines.append(f"  {label:<14}{shown}{remarks[name]}")
    return lines
