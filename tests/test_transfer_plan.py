"""The plan of a transfer grid against one made by hand: its jobs, what their keys depend on, its
faults."""

import itertools

import pytest
import yaml
from folders import faults
from frozen import a_run

from idmm.config import METHODS, FinetuneConfig, PretrainConfig, parsing
from idmm.config.parsing import parse
from idmm.data.registry import DATASETS
from idmm.grid.config import GridConfig
from idmm.grid.plan import Cell, GridPlan

BACKBONE = {
    "name": "vit_tiny_patch16_224",
    "label": "tiny",
    "kwargs": {"embed_dim": 32, "depth": 1, "num_heads": 2},
}
BASE = {
    "out": "nowhere",
    "sources": [
        "digits",
        {
            "name": "digits",
            "label": "few",
            "subset": {"total": 60},
        },
    ],
    "targets": ["digits", {"name": "digits", "subset": {"per_class": 5}}],
    "methods": ["idmm", "simclr"],
    "backbones": [BACKBONE],
    "seeds": [0, 1],
    "pretrain": {"views": {"crops": [{"count": 2}]}},
}


def grid(**changes):
    return parsing.build(GridConfig, {**BASE, **changes})


def checked(config):
    """The plan of a grid without faults."""
    whole = GridPlan(config)
    assert not whole.faults
    return whole


def plan(config, finished=()):
    return checked(config).remaining(finished)


def keys(**changes):
    """The key of each job by its stage and title."""
    return {(job.command, job.title): job.key for job in plan(grid(**changes))}


def cells(**changes):
    """Jobs by cell, and a pretraining's job by the cell that needs it."""
    whole = checked(grid(**changes))
    jobs = {cell: whole.jobs[key] for cell, key in whole.cells.items()}
    return jobs, {cell: whole.jobs.get(job.needs) for cell, job in jobs.items()}


def test_against_a_naive_enumeration():
    jobs, starts = cells()
    expected = [("scratch", "none", None)]
    expected += list(itertools.product(["digits", "few"], ["idmm", "simclr"], [0, 1]))
    expected_cells = set()
    for source, method, seed in expected:
        for target in ("digits", "digits-per_class5"):
            for finetune_seed in [0, 1] if seed is None else [seed]:
                expected_cells.add(Cell(source, method, "tiny", target, seed, finetune_seed))
    assert set(jobs) == expected_cells
    assert len(expected_cells) == 20
    assert len({job.key for job in jobs.values()}) == 20, "each cell is a run of its own"
    pretrainings = [start for start in starts.values() if start is not None]
    assert len(pretrainings) == 16
    assert len({start.key for start in pretrainings}) == 8, "both targets share a pretraining"
    for cell, job in jobs.items():
        start = starts[cell]
        config = parsing.build(FinetuneConfig, job.config)
        assert job.command == "finetune"
        assert config.seed == cell.seed
        assert config.init is None
        assert (config.data.subset is None) == (cell.target == "digits")
        assert config.model.kwargs == BACKBONE["kwargs"]
        assert (start is None) == (cell.source == "scratch")
        if start is not None:
            config = parsing.build(PretrainConfig, start.config)
            assert config.seed == cell.pretrain_seed
            assert config.method.name == cell.method
            assert (config.data.subset is None) == (cell.source == "digits")
    every = plan(grid())
    order = [job.key for job in every]
    assert len(order) == 28 == len({job.folder for job in every})
    for each in every:
        assert each.needs is None or order.index(each.needs) < order.index(each.key)


def test_seeds_of_either_stage():
    jobs, _ = cells(
        pretrain_seeds=[3, 4], finetune_seeds=[5, 6, 7], methods=["idmm"], sources=["digits"]
    )
    pairs = {(cell.pretrain_seed, cell.seed) for cell in jobs if cell.source == "digits"}
    assert pairs == set(itertools.product([3, 4], [5, 6, 7]))
    assert {cell.seed for cell in jobs if cell.source == "scratch"} == {5, 6, 7}


def test_scratch_weights_and_pairs(tmp_path):
    for cell in cells(scratch=False)[0]:
        assert cell.source != "scratch"
    path = str(a_run(tmp_path / "run"))
    jobs, _ = cells(
        sources=[], weights=[{"label": "IN supervised", "path": path}], targets=["digits"]
    )
    rows = {
        (c.source, c.method, c.pretrain_seed, c.seed): job.config["init"] for c, job in jobs.items()
    }
    starts = {"scratch": None, "IN supervised": path}
    assert rows == {
        (source, "none", None, seed): init for source, init in starts.items() for seed in (0, 1)
    }
    same, _ = cells(
        pairs="same",
        targets=[
            "digits",
            {
                "name": "digits",
                "label": "few",
                "subset": {"total": 60},
            },
        ],
    )
    assert {(c.source, c.target) for c in same if c.source != "scratch"} == {
        ("digits", "digits"),
        ("few", "few"),
    }
    assert {c.target for c in same if c.source == "scratch"} == {"digits", "few"}


def test_a_folder_is_called_by_the_end_of_its_path():
    moss = {"name": "folder", "root": "/data/moss"}
    stamps = {"root": "stamps/"}
    sources = [
        moss,
        stamps,
        {**stamps, "subset": {"total": 50}},
        "digits",
        {"name": "folder", "label": 7},
    ]
    entries = checked(grid(sources=sources, targets=[{**moss, "label": None}])).entries
    assert [entry.label for entry in entries["sources"]] == [
        "moss",
        "stamps",
        "stamps-total50",
        "digits",
        "7",
    ]
    assert [entry.label for entry in entries["targets"]] == ["moss"]


PRETRAINED = "not scratch"
FIRST = BASE["sources"][0]
FEW = BASE["sources"][1]
VIEWS = BASE["pretrain"]


@pytest.mark.parametrize(
    "touched, change",
    [
        ("finetune ", {"finetune": {"train": {"epochs": 7}}}),
        (PRETRAINED, {"pretrain": {**VIEWS, "train": {"epochs": 7}}}),
        (
            "-idmm-",
            {"methods": [{"name": "idmm", "pretrain": {"method.label_smoothing": 0.0}}, "simclr"]},
        ),
        (
            "to-digits-s",
            {"targets": [{"name": "digits", "finetune": {"train.lr": 0.5}}, BASE["targets"][1]]},
        ),
        ("finetune digits-", {"sources": [{"name": "digits", "finetune": {"train.lr": 0.5}}, FEW]}),
        (" few-", {"sources": [FIRST, {**FEW, "subset": {"total": 61}}]}),
        ("tiny", {"backbones": [{**BACKBONE, "kwargs": {**BACKBONE["kwargs"], "depth": 2}}]}),
        ("probe", {"target": {"protocol": "probe"}}),
        (
            None,
            {
                "pretrain": {
                    **VIEWS,
                    "data": {"workers": 3, "cache": "off"},
                    "train": {"device": "cpu"},
                }
            },
        ),
        (None, {"pretrain": {**VIEWS, "resume": "must"}}),
        (
            None,
            {
                "sources": ["digits", {**FEW, "label": "fewer"}],
                "backbones": [{**BACKBONE, "label": "t"}],
            },
        ),
        (None, {name: BASE[name][::-1] for name in ("sources", "targets", "methods", "seeds")}),
    ],
)
def test_keys_change_exactly_with_what_a_job_computes(touched, change):
    """``touched`` stands in the STAGE TITLE of the jobs that are others, and of no other job."""
    before = set(keys().values())
    after = keys(**change)
    expected = set()
    for stage, title in after:
        if touched == PRETRAINED:
            concerned = not title.startswith("scratch")
        else:
            concerned = touched is not None and touched in f"{stage} {title}"
        if concerned:
            expected.add((stage, title))
    assert {name for name, key in after.items() if key not in before} == expected
    assert bool(expected) == (touched is not None)
    assert {job.config.get("resume", "auto") for job in plan(grid(**change))} == {"auto"}


def test_keys_hold_paths_from_the_folder_of_the_grid(tmp_path, monkeypatch):
    all_keys = []
    for out, current, root in (
        ("a", "a", "data"),
        ("a", "b", "../a/data"),
        ("b", "b", "data"),
        ("a", "b", "data"),
    ):
        (
            (tmp_path / current / "data").mkdir(parents=True, exist_ok=True),
            monkeypatch.chdir(tmp_path / current),
        )
        all_keys += keys(
            out=str(tmp_path / out / "grid"), sources=[], seeds=[0], targets=[{"root": root}]
        ).values()
    assert all_keys[0] == all_keys[1] == all_keys[2] != all_keys[3], "b is a, moved with its images"


def test_keys_change_with_the_content_of_lists(tmp_path):
    file = tmp_path / "list.csv"
    all_keys = set()
    for name, text in itertools.product(("labels", "groups", "exclude"), ("path", "path,class")):
        file.write_text(text)
        all_keys |= set(
            keys(
                sources=[],
                seeds=[0],
                targets=[{"root": str(tmp_path), name: str(file)}],
            ).values()
        )
    assert len(all_keys) == 6


def write(path, **content):
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_recipes_and_overrides(tmp_path):
    """The last entry's recipe replaces the base's; the keys of all layers go over it, those of
    entries last."""
    base = write(tmp_path / "base.yaml", train={"epochs": 3, "lr": 0.1}, views={"size": 32})
    override = write(
        tmp_path / "own.yaml", train={"epochs": 4}, method={"name": "idmm", "temperature": None}
    )
    changes = {
        "pretrain": {
            "config": base,
            "train": {"lr": 0.2},
            "views.crops": [{"count": 2}],
        },
        "methods": [
            "idmm",
            {"name": "simclr", "pretrain": {"config": override, "method": {"temperature": 0.3}}},
        ],
        "sources": [{"name": "digits", "pretrain": {"train": {"batch_size": 9}}}],
    }
    _, starts = cells(**changes)
    configs = {cell.method: start.config for cell, start in starts.items() if start}
    idmm = configs["idmm"]
    simclr = configs["simclr"]
    assert [idmm["train"][n] for n in ("epochs", "lr", "batch_size")] == [3, 0.2, 9]
    assert [simclr["train"][n] for n in ("epochs", "lr", "batch_size")] == [4, 0.2, 9]
    assert [start["views"]["size"] for start in (idmm, simclr)] == [32, 112], (
        "nothing of the base's recipe is left"
    )
    assert simclr["method"]["temperature"] == 0.3
    assert len(simclr["views"]["crops"]) == 1


def test_roots():
    rooted = [
        {"name": "pets", "root": "/mine"},
        {"name": "folder", "root": "/f"},
    ]
    jobs, starts = cells(
        sources=["flowers", *rooted, "digits"],
        targets=["dtd"],
        methods=["idmm"],
        roots="/data",
        seeds=[0],
    )
    roots = {cell.source: start.config["data"]["root"] for cell, start in starts.items() if start}
    assert roots == {
        "flowers": "/data/flowers",
        "pets": "/mine",
        "f": "/f",
        "digits": None,
    }
    assert {job.config["data"]["root"] for job in jobs.values()} == {"/data/dtd"}


def test_flags(tmp_path):
    file = write(
        tmp_path / "g.yaml", sources=["digits"], targets=["digits"], pretrain={"train": {"lr": 0.1}}
    )
    argv = [
        "--config",
        file,
        "--out",
        "x",
        "--pretrain.train.epochs",
        "5",
        "--finetune.data.subset={per_class: 2}",
    ]
    argv += ["--finetune.model.freeze"]  # a switch
    config = parse(
        GridConfig,
        [*argv, "--pretrain.config", "r.yaml", "--target.protocol", "probe"],
        "idmm transfer",
    )
    assert config.pretrain == {"train": {"lr": 0.1, "epochs": 5}, "config": "r.yaml"}
    assert config.finetune == {"data": {"subset": {"per_class": 2}}, "model": {"freeze": True}}
    assert config.target.protocol == "probe"
    wrong = ["--pretrain.train.lr", "--sorces", "x", "--finetune.train.lr", "[1"]
    assert faults(parse, GridConfig, [*argv, *wrong], "t") == [
        "--sorces: unknown flag. Did you mean '--sources'?",
        "--pretrain.train.lr: expected a value (FLOAT)",
        "finetune.train.lr: got '[1', which is not YAML (expected ',' or ']', but got "
        "'<stream end>', line 1)",
    ]


def test_all_faults_together_each_where_it_stands(tmp_path):
    bad = {
        "sources": [
            "digits",
            "flovers",
            {"name": "digits", "subset": {"total": 3, "fraction": 0.5}},
            {"label": "x"},
        ],
        "targets": ["digits", {"name": "digits", "lable": "y"}],
        "methods": ["idmm", "simclir", {"name": "mocov2", "pretrain": {"method": {"outputs": 5}}}],
        "backbones": [
            BACKBONE,
            {"name": "resnet18", "kwargs": [1]},
            {"name": "resnet18", "pretrain": 3},
        ],
        "weights": [
            {"label": "IN", "path": "/none"},
            {"path": "z"},
            {
                "label": "scratch",
                "path": ".",
                "backbone": "tiny",
            },
        ],
        "pretrain": {"config": str(tmp_path / "none.yaml")},
        "finetune": {"train": {"epoch": 3, "lr": -1}},
    }
    lines = [str(fault) for fault in GridPlan(grid(**bad)).faults]
    names = ", ".join(DATASETS)
    assert lines == [
        "sources[3]: got {'label': 'x'}, expected a name or a mapping with 'name'",
        "targets[1].lable: unknown key. Did you mean 'label'?",
        "backbones[2].pretrain: got 3, expected a mapping",
        "weights[1]: got {'path': 'z'}, expected a name or a mapping with 'label'",
        "targets[0] and targets[1]: each has the label 'digits'. Give each its own label",
        "backbones[1] and backbones[2]: each has the label 'resnet18'. Give each its own label",
        "weights: 'scratch' is the label of rows without pretraining. Choose another",
        f"sources 'flovers': data.name: 'flovers' is not known, expected one of {names}. Did "
        "you mean 'flowers'?",
        "sources 'digits-total3-fraction0.5': data.subset: expected exactly one of per_class, "
        "total, fraction",
        f"methods 'simclir': 'simclir' is not known, expected one of {', '.join(METHODS)}. "
        "Did you mean 'simclr'?",
        "backbones 'resnet18': kwargs: got [1], expected a mapping",
        "weights 'IN': path: got '/none', expected an existing run folder or file of weights",
        "weights 'IN': backbone: got None, expected one of tiny, resnet18, resnet18",
        f"pretrain of idmm on digits: config: cannot read '{tmp_path / 'none.yaml'}' (No such "
        "file or directory), "
        "expected a YAML file",
        "finetune on digits: train.lr: got -1, expected greater than 0",
        "finetune on digits: train.epoch: unknown key. Did you mean 'train.epochs'?",
    ]


@pytest.mark.parametrize(
    "change, fault",
    [
        (
            {"sources": [], "scratch": False},
            "sources: none, and neither scratch nor weights: there is nothing to run",
        ),
        (
            {"weights": [{"label": "digits", "path": "."}]},
            "weights: 'digits' is also the label of a source",
        ),
        ({"targets": [{"root": ""}]}, "targets[0].root: got '', expected a folder"),
        (
            {"pretrain": {"out": "x"}},
            "pretrain: out: 'x', but the grid's 'out' decides it. Set it there",
        ),
        (
            {"pretrain": {"config": 3}},
            "pretrain of idmm on digits: config: got 3, expected the path of one YAML file",
        ),
        (
            {"targets": [{"name": "digits", "finetune": {"seed": 7}}]},
            "targets[0].finetune: seed: 7, but the grid's",
        ),
        (
            {"pairs": "same", "targets": ["digits"]},
            "pairs: 'same', but no target has the label 'few' of that source",
        ),
    ],
)
def test_faults_one_by_one(change, fault):
    assert any(str(one).startswith(fault) for one in GridPlan(grid(**change)).faults)
