"""``idmm probe``: how good the frozen features of a run are, in minutes instead of a fine-tuning."""

import json

from idmm.config.commands import ProbeCommand, probe_config
from idmm.files import made_folder, write_text
from idmm.stages.probe import measure


def probe(given: ProbeCommand) -> dict:
    """Measures frozen features, prints the table and writes ``probe.json`` to ``given.out``.

    Returns:
        What ``probe.json`` holds, see :func:`idmm.stages.probe.measure`.

    Raises:
        UserError: No such run, no labels, a size that the model cannot take, or ``out`` cannot be written.
        RunError: The features are not finite, or memory ran out.
    """
    out = made_folder(given.out)
    result = measure(probe_config(given, given.init))
    print("\n".join(table(result)))
    if out is not None:
        write_text(out / "probe.json", json.dumps(result, indent=2) + "\n")
        print(f"written: {out / 'probe.json'}")
    return result


def table(result: dict) -> list[str]:
    """Returns ``probe.json`` as lines of text."""
    counts = f"{result['train_size']:,} training and {result['test_size']:,} test images"
    where = f"{result['init']} ({result['model']}, {result['size']} px) on {result['dataset']}"
    lines = [f"{where}: {counts}, {result['num_classes']} classes"]
    metrics = [name for name in ("top1", "mean_per_class") if name in result["probe"]]
    lines.append(" " * 16 + "".join(f"{name:<16}{'95 % interval':<16}" for name in metrics))
    remarks = {
        "knn": f"k = {result['knn']['k']}",
        "probe": f"C = {result['probe']['strength']:g}, chosen by {result['probe']['chosen_by']}",
    }
    for name, label in (("knn", "kNN"), ("probe", "linear probe")):
        cells = [(f"{result[name][m]:.1f}", result[name][f"{m}_interval"]) for m in metrics]
        shown = "".join(f"{value:<16}{f'{low:.1f} to {high:.1f}':<16}" for value, (low, high) in cells)
        lines.append(f"  {label:<14}{shown}{remarks[name]}")
    return lines
