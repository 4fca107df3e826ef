"""The papers' tables and recipes: each table has its line in docs/reproduce.md, and its jobs are
planned."""

import re
import shlex

import pytest
from helpers import ROOT

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.parsing import build, flatten, parse
from idmm.config.reading import recipes
from idmm.grid.config import GridConfig
from idmm.grid.plan import GridPlan
from idmm.models import create_backbone, public
from idmm.models.public import PublicWeights

PAGE = (ROOT / "docs/reproduce.md").read_text()
PAPERS = {  # all numbered tables, and the figures with results
    "IDMM paper": [*(f"Table {n}" for n in range(1, 11)), "Figure 2", "Figure 3", "Figure 4"],
    "drloc paper, supplement": [
        "Table 2a",
        "Table 2b",
        *(f"Table {n}" for n in range(1, 17) if n != 2),
        "Figure 3",
    ],
}


def lines_of(paper):
    """The cells of each line of a paper's table on the page."""
    text = PAGE.partition(f"| {paper} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def numbered(name):
    """Each table of a line's name, e.g. of 'Tables 10 to 13' and 'Table 2, Figure 4'."""
    if span := re.fullmatch(r"Tables (\d+) to (\d+)", name):
        return [f"Table {n}" for n in range(int(span[1]), int(span[2]) + 1)]
    parts = name.split(", ")
    if name.startswith("Tables "):
        return [f"Table {part}" for part in name.removeprefix("Tables ").split(", ")]
    return [part for part in parts if not part.endswith("epochs")]


@pytest.mark.parametrize("paper", PAPERS)
def test_each_table_has_a_line(paper):
    tables = set()
    for name, command, *_ in lines_of(paper):
        assert command
        tables |= {*numbered(name)}
    assert tables == {*PAPERS[paper]}


GRIDS = []
for paper in PAPERS:
    for name, command, jobs, *_ in lines_of(paper):
        if jobs:
            GRIDS.append((name, command, jobs))


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plans a grid without its datasets and weights; returns the jobs in their order, and the
    cells."""
    monkeypatch.chdir(tmp_path)
    for name in ("81.5_T2T_ViT_14.pth.tar", "71.7_T2T_ViT_7.pth.tar"):
        (tmp_path / name).touch()
    file = tmp_path / "81.5_T2T_ViT_14.pth.tar"
    monkeypatch.setattr(public, "public_weights", lambda *_: PublicWeights("", "", file))

    def plan(*argv):
        grid = GridPlan(
            parse(GridConfig, ["--config", *argv, "--roots", "ROOTS", "--out", "o"], "test")
        )
        assert not grid.faults
        return grid.remaining(), grid

    return plan


@pytest.mark.parametrize("name, command, jobs", GRIDS, ids=lambda text: text[:40])
def test_grids_have_the_jobs_of_their_line(planned, name, command, jobs):
    remaining, _ = planned(*shlex.split(re.match("`([^`]*)`", command)[1]))
    stages = [job.command for job in remaining]
    counts = [stages.count(stage) for stage in ("pretrain", "finetune") if stage in stages]
    assert counts == [int(count) for count in jobs.split(" + ")]


def test_each_grid_is_on_the_page():
    for recipe in recipes():
        folder, name = recipe.split("/")
        if folder == "transfer":
            assert f"`{name}" in PAGE or f"--config {name}" in PAGE


def cells(plan):
    """The resolved configs of a grid's cells: (source, method, backbone, target) -> pretraining,
    fine-tuning."""
    configs = {}
    for cell, key in plan.cells.items():
        job = plan.jobs[key]
        start = plan.jobs[job.needs].config if job.needs else None
        configs[cell.source, cell.method, cell.backbone, cell.target] = start, job.config
    return configs


def changed(one, other):
    one = flatten(one)
    other = flatten(other)
    return {name for name in one | other if one.get(name) != other.get(name)}


def test_table_8_goes_one_step_at_a_time(planned):
    _, plan = planned("table8")
    rows = [start for start, _ in cells(plan).values()]
    steps = [changed(a, b) for a, b in zip(rows[:-1], rows[1:], strict=True)]
    assert steps == [
        {"method.label_smoothing"},
        {"views.size"},
        {"views.crops"},
        {"method.cutmix_alpha"},
    ]
    first, last = (build(PretrainConfig, rows[n]) for n in (0, -1))
    assert first.method.label_smoothing == 0
    assert first.method.cutmix_alpha == 0
    assert first.views.size == 224
    assert [group.count for group in first.views.crops] == [2]
    idmm, _ = build(
        PretrainConfig, {**rows[0], **{"method": {"name": "idmm"}, "views": {}}}
    ).fill_from_method()
    assert last.method == idmm.method
    assert last.views == idmm.views, "the last row is the whole recipe"


def test_table_9_differs_by_the_mlp(planned):
    _, plan = planned("table9")
    rows = {}
    for (_, method, _, target), (start, _) in cells(plan).items():
        if target == "flowers":
            rows[method] = start
    assert changed(rows["idmm"], rows["idmm + MLP"]) == {"method.projection"}
    assert changed(rows["simclr"], rows["simclr without MLP"]) == {
        "method.projection",
        "method.dim",
    }
    assert rows["idmm + MLP"]["method"]["projection"]
    assert not rows["simclr without MLP"]["method"]["projection"]


def test_tables_2_and_7_are_the_papers(planned):
    _, plan = planned("table2")
    settings = {}
    for (source, method, _, _), (start, _) in cells(plan).items():
        if source == "flowers":
            settings[method] = (
                start["train"]["batch_size"],
                start["train"]["lr"],
                start["train"]["epochs"],
            )
    assert settings == {  # None is the family's 5e-4
        "simclr": (512, 5e-4, 800),
        "supcon": (512, 5e-4, 800),
        "mocov2": (256, 5e-4, 800),
        "mocov3": (256, 1.5e-4, 800),
        "dino": (512, 5e-4, 800),
        "idmm": (256, None, 800),
    }
    _, plan = planned("table7")
    for (source, _, _, target), (start, tuned) in cells(plan).items():
        assert f"{tuned['train']['epochs']} epochs" == target
        assert tuned["data"]["subset"] is None
        assert tuned["train"]["batch_size"] == 1024
        assert tuned["train"]["lr"] == 1e-3
        assert tuned["train"]["weight_decay"] == 0.05
        subset = {"SIN-10k": ("per_class", 10), "SIN-total": ("total", 10_000)}.get(source)
        assert subset is None or start["data"]["subset"][subset[0]] == subset[1]


DRLOC = ("2", "3", "4", "5", "6", "7", "9", "16")


@pytest.mark.parametrize("number", DRLOC)
def test_drloc_grids_differ_by_drloc_only(planned, number):
    """Networks of the same name differ in drloc and nowhere else, and have the networks' own
    augmentation."""
    _, plan = planned(f"drloc_table{number}")
    networks = {}
    for (source, _, _, target), (_, tuned) in cells(plan).items():
        networks.setdefault((tuned["model"]["name"], source, target), []).append(tuned)
        assert tuned["augment"]["random_erasing"] == 0.25
        assert tuned["augment"]["mixing"] == "batches"
        assert tuned["train"]["weight_decay"] == 0.05
        assert tuned["train"]["classifier_init"] == "random"
        assert tuned["drloc"]["weight"] in (0.0, 0.01, 0.1, 0.5, 1.0)
    for (name, *_), configs in networks.items():
        if name == "swin_tiny_patch4_window7_224":
            assert configs[0]["model"]["drop_path"] == 0.2
        differences = set().union(*(changed(configs[0], config) for config in configs[1:]))
        assert differences
        assert all(name.startswith("drloc.") for name in differences)


def test_drloc_weights_start_from_their_own_files(planned):
    _, plan = planned("drloc_table5")
    starts = {backbone: tuned["init"] for (_, _, backbone, _), (_, tuned) in cells(plan).items()}
    for name, path in starts.items():
        if name.startswith("T2T"):
            assert path.endswith("81.5_T2T_ViT_14.pth.tar")
    assert (
        starts["Swin-T"] == starts["Swin-T + drloc"] == "timm:swin_tiny_patch4_window7_224.ms_in1k"
    )


def test_networks_of_table_7_have_their_own_optimization(planned):
    _, plan = planned("drloc_table7")
    trains = {backbone: tuned["train"] for (_, _, backbone, _), (_, tuned) in cells(plan).items()}
    swin = trains["Swin-T"]
    t2t = trains["T2T-ViT-14"]
    assert swin["epochs"] == 300
    assert swin["batch_size"] == 1024
    assert swin["lr"] == 1e-3
    assert swin["clip_grad"] == 5.0
    assert t2t["epochs"] == 300
    assert t2t["batch_size"] == 512
    assert t2t["lr"] == 5e-4
    assert t2t["clip_grad"] is None
    assert t2t["warmup_epochs"] == 10
    assert t2t["ema"] == 0.99996


def recipe(name, *flags):
    return parse(FinetuneConfig, ["--config", name, *flags], "test")


FLAGS = {}  # of each network, from the table in docs/method.md
METHOD = (ROOT / "docs/method.md").read_text()
for line in METHOD.partition("| `--model.name` | flags |")[2].partition("\n\n")[0].splitlines()[2:]:
    networks, flags = re.fullmatch(r"\| (.*) \| `(.*)` \|", line).groups()
    for network in re.findall(r"`(\w+)`", networks):
        FLAGS[network] = ["--model.name", network, *shlex.split(flags)]


@pytest.mark.parametrize("protocol", ["scratch", "finetune"])
@pytest.mark.parametrize(
    "network, drop_path, weight, kwargs",
    [
        ("swin_tiny_patch4_window7_224", 0.2, 0.5, {}),
        ("t2t_vit_14", 0.1, 0.1, {}),
        ("cvt_13", 0.1, 0.1, {}),
        ("vit_base_patch16_224", 0.0, 0.01, {"proj_drop_rate": 0.1}),
        ("resnet50", 0.0, 0.1, {}),
    ],
)
def test_own_recipes_of_drloc(protocol, network, drop_path, weight, kwargs):
    """Of the networks' releases. Optimization is the paper's, as in the recipes with IDMM's
    augmentation."""
    config = recipe(f"drloc/{protocol}_own", *FLAGS[network])
    augment = config.augment
    model = config.model
    assert augment.random_erasing == 0.25
    assert augment.mixup_alpha == 0.8
    assert augment.cutmix_alpha == 1.0
    assert augment.mixing == "batches"
    assert augment.randaugment == "rand-m9-mstd0.5-inc1"
    assert augment.jitter_prob == 0.0
    assert augment.grey_prob == 0.0
    assert augment.label_smoothing == 0.1
    assert model.drop_path == drop_path
    assert config.drloc.weight == weight
    assert model.kwargs == kwargs
    usual = recipe({"scratch": "drloc/scratch_100", "finetune": "drloc/finetune"}[protocol])
    changed = {
        name for name, value in vars(config.train).items() if value != getattr(usual.train, name)
    }
    assert changed == {"clip_grad"}
    assert config.train.clip_grad == 5.0


def test_pvt_v2_of_0_8_million_parameters(planned):
    (flags,) = re.findall(r"0\.8 M parameters \(Figure 3\) is `(.*)`", PAGE)
    model = parse(FinetuneConfig, shlex.split(flags), "test").model
    networks = [tuned["model"]["kwargs"] for _, tuned in cells(planned("figure3")[1]).values()]
    assert model.kwargs in networks
    counts = []
    for classes in (0, 102):
        network = create_backbone(model.name, 224, num_classes=classes, **model.kwargs)
        counts.append(sum(parameter.numel() for parameter in network.parameters()))
    assert counts == [771_680, 784_838]
