"""How a grid calls its folders, which twins it refuses, and that its folder goes on from other places."""

import shutil

import pytest
from folders import faults, tree
from frozen import a_run
from helpers import call
from test_transfer_plan import keys
from transfers import GRID, Made, cells, inside, results, runs

from idmm.config import parsing
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import GridPlan

FOLDER = {"name": "folder"}


def plan(**changes):
    return GridPlan(parsing.build(GridConfig, {"out": "nowhere", **GRID, **changes}))


def labels(sources, targets, **changes):
    """The labels of both lists; the plan has no faults."""
    found = plan(sources=sources, targets=targets, **changes).checked().entries
    return tuple([entry["label"] for entry in found[name]] for name in ("sources", "targets"))


# ------------------------------------------------------------------ labels
def test_a_folder_is_called_by_the_end_of_its_path():
    moss, stamps = {**FOLDER, "root": "/data/moss"}, {"root": "stamps/"}
    found = labels([moss, stamps, {**stamps, "subset": {"total": 50}}, "digits"], [{**moss, "label": None}])
    assert found[0] == ["moss", "stamps", "stamps-total50", "digits"]
    assert labels([{**FOLDER, "label": 7}], [{**FOLDER, "root": ".."}])[0] == ["7"]


def test_more_of_the_path_where_that_is_not_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other, third = ({"root": f"{name}/train"} for name in ("a/moss", "b/moss", "b/fern"))
    assert labels([one, other, third], [one]) == (["a/moss/train", "b/moss/train", "fern/train"], ["a/moss/train"])
    here = {"root": str(tmp_path / "a/moss/train")}
    assert labels([one], [here]) == (["train"], ["train"]), "one folder, written in two ways"
    # what another entry is called is taken
    assert labels([{"root": "x/digits"}, "digits"], ["digits"])[0] == ["x/digits", "digits"]
    assert labels([{"root": "x/moss"}], [{"root": "y", "label": "moss"}]) == (["x/moss"], ["moss"])
    assert labels([{"root": "x/moss", "label": "mine"}, {"root": "y/moss"}], ["digits"])[0] == ["mine", "moss"]
    assert labels([{"root": "x/scratch"}], ["digits"])[0] == ["x/scratch"]


def test_the_picture_of_two_folders_without_labels(tmp_path, monkeypatch, capsys):
    """Both were called 'folder' in every table."""
    Made(monkeypatch)
    shape = {"train": {"a": 4, "b": 4}, "test": {"a": 2, "b": 2}}
    roots = [{**FOLDER, "root": str(tree(tmp_path / name, **shape))} for name in ("moss", "stamps")]
    tuning = {**GRID["finetune"], "data": {"workers": 0}}
    pretraining = {**GRID["pretrain"], "data": {"workers": 0}}
    given = {"sources": roots[:1], "targets": roots[1:], "finetune": tuning, "pretrain": pretraining}
    assert inside(tmp_path / "out", **given) == 0
    assert {cell[:2] for cell in cells(tmp_path / "out")} == {("scratch", "stamps"), ("moss", "stamps")}
    said = capsys.readouterr().out
    assert "folder" not in said and "stamps  none shown above scratch; highest: moss, idmm" in said


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"sources": [{"root": "a"}, {"root": "b", "label": "x"}, {"root": "c", "label": "x"}]},
            "sources[1] and sources[2]: each is called 'x'; give each entry a label of its own",
        ),
        (
            {"targets": ["digits", {"root": "a"}, {"root": "a", "val_fraction": 0.5}]},
            "targets[1] and targets[2]: each is called 'a'; give each entry a label of its own",
        ),
        (
            {"sources": [{"root": "a", "label": "x"}], "targets": [{"root": "b", "label": "x"}]},
            "sources[0] and targets[0]: each is called 'x', but their images differ; give them other labels",
        ),
    ],
)
def test_twins_are_refused_in_a_line_that_names_them(change, fault):
    assert faults(plan(**change).checked) == [fault]


def test_a_source_and_its_labelled_part_may_share_a_name_where_that_pairs_them():
    same = [{"root": root, "label": "moss"} for root in ("all", "labelled")]
    assert labels(same[:1], same[1:], pairs="same") == (["moss"], ["moss"])


# ------------------------------------------------------------------ grids of 0.1.0
def test_labels_and_where_weights_lie_are_in_no_key(tmp_path, monkeypatch):
    """Keys that 0.1.0 gave; its grids of folders and weights go on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.safetensors").write_bytes(b"weights")
    bare = {"pretrain": {}, "methods": ["idmm"], "backbones": ["resnet18"], "seeds": [0]}
    bare["finetune"] = {"train": {"classifier_init": "random"}}  # as 0.1.0 did
    for label in ({}, {"label": "folder"}, {"label": "else"}):
        mine = [{**FOLDER, "root": "/data/mine", **label}]
        found = set(keys(**bare, sources=mine, targets=mine).values())
        assert found == {"808eec087436", "7111f25fbceb", "2bb5a16384e3"}
    given = {"sources": [], "targets": ["digits"], "weights": [{"label": "IN", "path": "in.safetensors"}]}
    assert set(keys(**bare, **given).values()) == {"9d4a0124ee60", "14159707e7b7"}


def test_status_and_workers_find_relative_weights_from_elsewhere(tmp_path, monkeypatch, capsys):
    made = Made(monkeypatch)
    a_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    given = {"sources": [], "targets": ["digits"], "weights": [{"label": "IN", "path": "run"}]}
    assert inside("out", **given) == 0 and len(made.asked) == 2
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    capsys.readouterr()
    assert call(["transfer", "status", "../out"]) == 0
    assert capsys.readouterr().out == "grid: 2 of 2 cells\n  results so far: ../out/grid.md\n"
    stored = parsing.build(GridConfig, {**parsing.read_file("../out/grid.yaml"), "out": "../out"})
    assert stored.weights == [{"label": "IN", "path": str(tmp_path / "run"), "given": "run"}]
    config = next(job.config for job in GridPlan(stored).jobs.values() if job.config["init"])
    assert config["init"] == str(tmp_path / "run")


def test_a_dataset_is_the_same_however_it_is_written(tmp_path, monkeypatch, capsys):
    Made(monkeypatch)
    out, few = tmp_path / "out", [{"name": "digits", "subset": {"total": 60}}]
    assert inside(out, sources=["digits"], targets=few) == 0
    written = {"name": "digits", "root": None, "label": "other", "pretrain": {"train": {"epochs": 1}}}
    assert inside(out, sources=[written], targets=["digits"]) == 0
    assert inside(out, sources=few, targets=[{"name": "digits", "subset": {"total": 50}}]) == 2
    assert "holds a grid of other sources and targets" in capsys.readouterr().err


# ------------------------------------------------------------------ what is kept of another protocol
def test_probes_of_other_pretrainings_are_not_kept(tmp_path, monkeypatch):
    """They were shown beside the fine-tuning of new ones, and compared with it."""
    Made(monkeypatch)
    out = tmp_path / "out"
    assert inside(out, "--target.protocol", "probe") == 0
    assert inside(out) == 0 and len(cells(out, "probe")) == 6
    assert inside(out, "--pretrain.train.epochs", 3) == 0
    assert {source for source, *_ in cells(out, "probe")} == {"scratch"}, "it has no pretraining"
    assert inside(out) == 0 and len(cells(out, "probe")) == 6, "those are current again"
    shutil.rmtree(next(out.glob("runs/probe/few-*")))
    assert inside(out) == 0 and len(cells(out, "probe")) == 5


# ------------------------------------------------------------------ grid.json
def test_cells_have_what_results_tell_of_the_test_images(tmp_path, monkeypatch):
    told = {"top1_interval": [40.0, 60.0], "largest_class": 10.3, "test_size": 96, "pixel_knn": 33.3}
    Made(monkeypatch, **told)
    assert inside(tmp_path / "out") == 0
    for cell in results(tmp_path / "out")["cells"]:
        assert {name: cell[name] for name in told} == told
    assert "largest class is 10.3 % of them; kNN on raw pixels gets 33.3 %" in (tmp_path / "out/grid.md").read_text()


def test_a_damaged_grid_json_is_written_again(tmp_path, monkeypatch):
    Made(monkeypatch)
    out = tmp_path / "out"
    assert inside(out, "--target.protocol", "probe") == 0
    (out / "grid.json").write_text("{")
    assert inside(out) == 0 and len(cells(out)) == len(cells(out, "probe")) == 6 and len(runs(out)) == 14
