"""A cell by the cheap protocol: kNN and a linear probe of the frozen backbone, in its job's folder like a run."""

import json
from pathlib import Path

from idmm import options
from idmm.analysis.probe import describe, measured
from idmm.commands import Frozen
from idmm.config import Model
from idmm.files import write_text
from idmm.progress import logging_to


def probe(config: dict) -> dict:
    """Measures a backbone and writes ``result.json``.

    Args:
        config: ``out``, ``init`` (None: fresh weights of ``seed``), ``seed``, ``size``, ``data``, ``model``, ``train``
            with ``device``.

    Returns:
        ``top1`` (the linear probe's) and ``knn`` in percent, ``top5`` None, ``mean_per_class`` (the probe's) where the
        dataset's literature reports that, image counts, ``seed``, ``seconds``, and both ``readouts`` with intervals.

    Raises:
        UserError: As ``idmm probe``.
    """
    out = Path(config["out"])
    given = {name: config[name] for name in ("seed", "size", "data")} | {"device": config["train"]["device"]}
    frozen = options.build(Frozen, given)
    model = Model(name=config["model"]["name"], kwargs=config["model"]["kwargs"], drop_path=0.0)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "config.yaml", options.dump(frozen))
    with logging_to(out):
        found = measured(describe(config["init"], frozen, model), frozen)
    linear, knn = found.pop("probe"), found.pop("knn")
    result = {
        "top1": linear["top1"],
        "top5": None,
        "knn": knn["top1"],
        **{name: linear[name] for name in ("mean_per_class",) if name in linear},
        **found,
        "readouts": {"probe": linear, "knn": knn},
    }
    write_text(out / "result.json", json.dumps(result, indent=2) + "\n")
    return result
