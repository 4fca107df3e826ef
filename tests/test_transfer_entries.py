"""How a grid calls its folders, which twins it refuses, and that its folder goes on from other places."""

import pytest
from folders import faults
from transfers import GRID, Made, inside, results

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


# ------------------------------------------------------------------ grid.json
def test_cells_have_what_results_tell_of_the_test_images(tmp_path, monkeypatch):
    told = {"top1_interval": [40.0, 60.0], "largest_class": 10.3, "test_size": 96, "pixel_knn": 33.3}
    Made(monkeypatch, **told)
    assert inside(tmp_path / "out") == 0
    for cell in results(tmp_path / "out")["cells"]:
        assert {name: cell[name] for name in told} == told
    assert "largest class is 10.3 % of them; kNN on raw pixels gets 33.3 %" in (tmp_path / "out/grid.md").read_text()
