"""How a grid calls its folders, which twins it refuses, and that its folder goes on from other places."""

import shutil

import pytest
from folders import faults
from frozen import a_run
from helpers import call
from transfers import GRID, Made, cells, inside, results

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


# ------------------------------------------------------------------ status
def test_status_finds_relative_weights_from_elsewhere(tmp_path, monkeypatch, capsys):
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
