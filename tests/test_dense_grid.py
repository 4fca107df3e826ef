"""Grids whose targets are boxes and masks: whole ones by the command line, killed, planned, told, refused."""

import csv
import json
import signal

import pytest
from dense_trees import coco_tree, mask_tree
from folders import faults
from grids import cell, full, grid
from helpers import VIT, Forked
from transfers import results, runs, stamps

from idmm.config import parsing, reading
from idmm.report.table import MAIN, Table
from idmm.transfer.config import PROTOCOLS, GridConfig
from idmm.transfer.plan import GridPlan

SIDE = 64
TRAIN = {"epochs": 1, "size": SIDE, "batch_size": 4, "precision": "fp32", "device": "cpu", "save_minutes": 0}
DENSE = {"data": {"workers": 0}, "model": {"pyramid_width": 16}, "train": TRAIN}
JOBS = 1 + 2 * 2  # a pretraining; from it and from scratch to two targets
OLD = "source,method,backbone,target,pretrain_seed,seed,top1,top5,seconds,status".split(",")


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    root = tmp_path_factory.mktemp("trees")
    coco_tree(root / "boxes", train=6, val=2)
    mask_tree(root / "masks", train=6, val=2)
    return root


def config(trees, **changes):
    """The keys of a tiny grid: one source, boxes and masks."""
    return {
        "sources": [{"name": "digits", "subset": {"total": 40}, "label": "digits"}],
        "targets": [
            {"root": str(trees / "boxes"), "protocol": "detect"},
            {"root": str(trees / "masks"), "protocol": "segment"},
        ],
        "backbones": [{"name": "vit_tiny_patch16_224", "label": "tiny", "kwargs": VIT}],
        "pretrain": {
            "data": {"workers": 0},
            "views": {"size": 16, "crops": [{"count": 2, "scale": [0.3, 1.0]}]},
            "train": {"epochs": 1, "batch_size": 32, "lr": 1e-3, "precision": "fp32", "device": "cpu"},
        },
        "detect": DENSE,
        "segment": DENSE,
        **changes,
    }


def argv(trees, out, *more, **changes):
    path = out.with_name(f"{out.name}.yaml")
    path.write_text(json.dumps(config(trees, **changes)))
    return ["transfer", "--config", str(path), "--out", str(out), *more]


def plan(trees, **changes):
    return GridPlan(parsing.build(GridConfig, {"out": "nowhere", **config(trees, **changes)}))


def rows(out):
    with open(out / "grid.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(trees, tmp_path_factory):
    """A grid that is killed while it trains a detector, and taken up again."""
    out = tmp_path_factory.mktemp("grid") / "out"
    with Forked(argv(trees, out), out.with_name("first.err")) as process:
        assert process.until(lambda: any(out.glob("runs/detect/*/last/state.pt"))), process.said()
        process.send(signal.SIGKILL)
        process.wait()
    kept = stamps(out)
    assert len(kept) < 2 * JOBS and not (out / "grid.json").exists()
    with Forked(argv(trees, out), out.with_name("said")) as process:
        assert process.wait() == 0, process.said()
    assert {path: stamps(out)[path] for path in kept} == kept
    return out


# ------------------------------------------------------------------ whole
def test_cells_are_what_the_stages_measured(whole):
    """In grid.json, and in the long table, which has two columns more."""
    found = results(whole)["cells"]
    assert len(found) == 4 and len(runs(whole)) == JOBS
    targets, values = (("boxes", "detect"), ("masks", "segment")), {}
    wanted = {(source, *target) for source in ("scratch", "digits") for target in targets}
    assert {(c["source"], c["target"], c["protocol"]) for c in found} == wanted
    for one in found:
        measured = json.loads((whole / one["folder"] / "result.json").read_text())
        names = ("ap", "ap50", "mask_ap") if one["protocol"] == "detect" else ("miou", "macc", "pixel_accuracy")
        assert {name: one[name] for name in names} == {name: measured[name] for name in names}
        assert one["status"] == "ok" and one["top1"] is None and one["folder"].startswith(f"runs/{one['protocol']}/")
        values[one["source"], one["target"]] = names[0], one[names[0]]
        if one["source"] == "digits":
            start = reading.read_file(whole / one["folder"] / "config.yaml")["init"]
            assert start == str(whole / one["pretrain_folder"])
    found = rows(whole)
    assert list(found[0]) == [*OLD, "metric", "value"] and len(found) == 4
    for row in found:
        assert row["top1"] == row["top5"] == ""
        name, value = values[row["source"], row["target"]]
        assert row["metric"] == name and float(row["value"]) == pytest.approx(value)


# ------------------------------------------------------------------ planned
def test_the_protocol_of_all_targets_and_of_one(trees):
    boxes, masks = config(trees)["targets"]
    bare = {"root": boxes["root"]}
    one, other = plan(trees, targets=[boxes]), plan(trees, targets=[bare], target={"protocol": "detect"})
    assert set(one.checked().jobs) == set(other.checked().jobs), "keys do not tell where the protocol was said"
    mixed = plan(trees, targets=["digits", boxes, masks], target={"protocol": "probe"}).checked()
    assert [job.stage for job in mixed.jobs.values() if job.needs is None].count("pretrain") == 1
    assert {job.stage for job in mixed.jobs.values()} == {"pretrain", "probe", "detect", "segment"}


# ------------------------------------------------------------------ told
def mixed(seeds=3):
    """Two sources on a target of each kind; 12 points between sources, next to nothing between seeds."""
    cells = full(2, ("idmm",), 1, seeds)
    for target, protocol in (("boxes", "detect"), ("masks", "segment")):
        for source, method, high in (("scratch", "none", 20), ("flowers", "idmm", 32), ("pets", "idmm", 44)):
            for seed in range(seeds):
                one = cell(source, method, target=target, seed=seed, top1=None)
                value = {MAIN[protocol]: high + seed / 100}
                cells.append({**one, "protocol": protocol, "status": "ok", "test_size": 50, "seconds": 1.0, **value})
    return {**grid(cells), "protocols": ["finetune", "detect", "segment"]}


def test_intervals_are_over_seeds_alone(tmp_path):
    """An AP is no share of the test images: Wilson's interval would be wrong."""
    found = Table(mixed(), "detect")
    assert all(one.stats.images is None and one.stats.half is not None for one in found.cells.values())
    assert found.intervals().startswith("Intervals are 95 % intervals over seeds (")
    assert "Other test images would change AP, too" in found.intervals()
    one = Table(mixed(seeds=1), "segment")
    assert one.intervals() == "One run each: there are no intervals."


# ------------------------------------------------------------------ refused
def test_faults_of_entries_and_options(trees):
    boxes, masks = config(trees)["targets"]
    given = [
        {**boxes, "protocol": "detekt"},
        {**masks, "finetune": {"train": {"lr": 1.0}}},
        {"name": "digits", "protocol": "detect", "label": "few"},
    ]
    assert faults(plan(trees, targets=given).checked) == [
        f"targets 'boxes': protocol: got 'detekt', expected one of {', '.join(PROTOCOLS)}. Did you mean 'detect'?",
        "targets 'masks': protocol: segment takes no options of finetune. Set them under segment",
        "detect on few: data.name: got 'digits', expected 'folder'",
    ]
