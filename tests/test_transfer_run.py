"""``idmm transfer``: whole tiny grids through the command line, what is run again and what is not,
failures, faults."""

import csv
import io
import json
import shutil

import pytest
from folders import paint, tree
from frozen import a_run
from helpers import VIT, call, call_ok, column, metrics, read, same
from transfers import GRID, JOBS, Made, begun, cells, inside, results, runs, stamps

import idmm
from idmm.errors import Interrupted, RunError
from idmm.files import Lock


@pytest.fixture
def copied(whole_grid, tmp_path):
    """A finished grid that may be changed."""
    return shutil.copytree(whole_grid, tmp_path / "grid")


def fail(error):
    """An action that raises."""

    def do():
        raise error

    return do


def test_a_grid(whole_grid):
    text = (whole_grid / "grid.csv").read_text()
    columns = "source,method,backbone,target,pretrain_seed,seed,top1,top5,seconds,status"
    assert text.startswith(f"{columns}\n")
    rows = {}
    for row in csv.DictReader(io.StringIO(text)):
        rows[row["source"], row["method"], row["target"]] = row
        assert row["status"] == "ok"
        assert row["backbone"] == "tiny"
        assert row["seed"] == "3"
        assert (row["pretrain_seed"] == "3") == (row["source"] != "scratch")
    expected = set()
    for start in (("scratch", "none"), ("digits", "idmm"), ("few", "idmm")):
        expected |= {(*start, "digits"), (*start, "other")}
    assert {*rows} == expected
    assert text.count("\n") == 1 + 6
    for cell in results(whole_grid)["cells"]:
        result = read(whole_grid / cell["folder"] / "result.json")
        for name in ("top1", "top5", "seconds"):
            assert cell[name] == result[name]
        row = rows[cell["source"], cell["method"], cell["target"]]
        assert float(row["top1"]) == pytest.approx(cell["top1"])
        assert cell["source_size"] == {"digits": 80, "few": 60}.get(cell["source"])
        assert result["train_size"] == {"digits": 40, "other": 20}[cell["target"]]
    assert len(runs(whole_grid)) == JOBS == begun(whole_grid)
    printed = whole_grid.with_name("said").read_text()
    assert "grid: 6 of 6 cells" in printed
    assert "6 of 6 cells done" in printed
    assert printed.count(", top-5 ") == 6, "each line is printed once"


def test_a_cell_is_what_the_two_stages_give_by_hand(whole_grid, tmp_path):
    pretrained = {
        **GRID["pretrain"],
        "seed": 3,
        "method": {"name": "idmm"},
    }
    model = {"name": "vit_tiny_patch16_224", "kwargs": VIT}
    data = {"workers": 0, "subset": {"total": 60}}
    idmm.pretrain(
        {
            **pretrained,
            "model": model,
            "data": data,
            "out": str(tmp_path / "a"),
        }
    )
    tuned = {
        **GRID["finetune"],
        "seed": 3,
        "model": model,
        "init": str(tmp_path / "a"),
        "out": str(tmp_path / "b"),
    }
    result = idmm.finetune(tuned)
    assert cells(whole_grid)["few", "digits", 3] == ("ok", result["top1"], result["top5"])
    (folder,) = whole_grid.glob("runs/finetune/few-*-to-digits-*")
    assert same(folder, tmp_path / "b")
    assert metrics(folder) == metrics(tmp_path / "b")


def test_from_python(tmp_path, monkeypatch, capsys):
    """Jobs run in the order of their needs; cells have what results hold of the test images."""
    measured = {
        "top1_interval": [40.0, 60.0],
        "largest_class": 10.3,
        "test_size": 96,
        "baseline_top1": 33.3,
    }
    measured |= {"params": 3_600_000, "backbone_params": 3_410_000}
    jobs = Made(monkeypatch, **measured)
    results_of_call = idmm.transfer({**GRID, "out": str(tmp_path / "out")})
    assert {*column(results_of_call["cells"], "status")} == {"ok"}
    assert len(jobs.asked) == JOBS
    for cell in results_of_call["cells"]:
        assert {name: cell[name] for name in measured} == measured
    assert results_of_call == results(tmp_path / "out")
    printed = capsys.readouterr().out
    assert "| few | idmm | tiny | 7 | 2 | 32 | 2 | adamw |" in printed
    assert "6 of 6 cells done" in printed
    assert "**tiny (3.41 M parameters)**" in printed
    assert "the largest class 10.3 %, the baseline 33.3 %" in printed
    for source in ("digits", "few"):
        tuned = [
            jobs.asked.index(f"{source}-idmm-s3-tiny-to-{target}-s3")
            for target in ("digits", "other")
        ]
        assert jobs.asked.index(f"{source}-idmm-tiny-s3") < min(tuned)


def test_the_second_call_does_nothing_whatever_the_labels(copied, monkeypatch, capsys):
    before = stamps(copied)
    jobs = Made(monkeypatch)
    assert inside(copied) == 0
    assert not jobs.asked
    assert stamps(copied) == before
    assert len(before) == 2 * JOBS
    assert "6 of 6 cells done" in capsys.readouterr().out
    assert inside(copied, sources=[{**GRID["sources"][1], "label": "sixty"}, "digits"]) == 0
    assert not jobs.asked
    assert cells(copied)["sixty", "digits", 3][0] == "ok"
    assert inside(copied, targets=[{**GRID["targets"][1], "label": "2 a class"}, "digits"]) == 0
    assert not jobs.asked
    (path,) = copied.glob("runs/finetune/few-*-to-other-*/result.json")
    path.write_text(json.dumps(read(path) | {"test_size": 7}))
    assert inside(copied) == 0
    assert "target 'other': its images changed between runs (7, " in capsys.readouterr().err


def test_a_job_that_fails_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    jobs = Made(monkeypatch)
    jobs.instead = {
        "few-idmm-tiny": fail(RunError("the loss is nan")),
        "scratch-tiny-to-other": fail(KeyError("odd")),
    }
    assert inside(out) == 1
    titles = ["few-idmm-tiny-s3", "scratch-tiny-to-other-s3"]
    assert [jobs.asked.count(title) for title in titles] == [1, 1]
    assert len(jobs.asked) == JOBS - 2, "what needs the failed one is not tried"
    failed = {(c["source"], c["target"]): c for c in results(out)["cells"] if c["status"] != "ok"}
    assert set(failed) == {("few", "digits"), ("few", "other"), ("scratch", "other")}
    assert {*column(failed.values(), "status")} == {"failed"}
    errors = {cell_key: cell["error"] for cell_key, cell in failed.items()}
    assert errors["few", "other"] == "the loss is nan"
    assert errors["scratch", "other"] == "KeyError: 'odd'"
    assert "the loss is nan" in (out / failed["few", "digits"]["log"]).read_text()
    assert "Traceback" in (out / failed["scratch", "other"]["log"]).read_text()
    output = capsys.readouterr().err
    assert (
        f"failed: few-idmm-tiny-s3: the loss is nan ({out}/runs/pretrain/few-idmm-tiny-s3-"
        in output
    )
    assert "failed: scratch-tiny-to-other-s3: KeyError: 'odd'" in output
    assert output.splitlines().count("pretrain: few-idmm-tiny-s3") == 1, (
        "a job is named when it begins"
    )
    assert status(out, capsys)[0] == "grid: 3 of 6 cells, 3 failed"
    assert inside(out, "--plan") == 0
    output = capsys.readouterr().out
    assert "few-idmm-tiny-s3  2 epochs, batches of 32, adamw, failed before\n" in output
    assert "4 jobs for 3 cells, 3 cells are done\n" in output
    jobs.asked.clear(), jobs.instead.clear()
    assert inside(out) == 0
    assert sorted(jobs.asked) == sorted(
        [*titles, *(f"few-idmm-s3-tiny-to-{t}-s3" for t in ("digits", "other"))]
    )
    assert {status for status, *_ in cells(out).values()} == {"ok"}
    assert not list((out / "jobs").glob("*.failed.json"))


def test_a_real_job_that_fails(copied, capsys):
    hot = {
        "name": "idmm",
        "label": "hot",
        "pretrain": {"train": {"lr": 1e30, "warmup_epochs": 0}},
    }
    assert (
        inside(
            copied,
            methods=["idmm", hot],
            sources=["digits"],
            targets=["digits"],
        )
        == 1
    )
    cell = next(c for c in results(copied)["cells"] if c["method"] == "hot")
    assert cell["status"] == "failed"
    assert "not finite" in cell["error"]
    assert "lr" in cell["error"]
    log = (copied / cell["log"]).read_text()
    assert log.count("the loss is not finite") == 1
    assert "pretrain/digits-hot-tiny-s3" in cell["log"]
    advice = "lower --pretrain.train.lr or set --pretrain.train.clip_grad 1"
    assert cell["error"].endswith(f". The last checkpoint is kept: {advice}"), (
        "in the grid's own flags"
    )
    assert cell["error"] in capsys.readouterr().err
    assert cells(copied)["scratch", "digits", 3][0] == "ok"


def test_plan_prints_and_runs_nothing(copied, tmp_path, monkeypatch, capsys):
    jobs = Made(monkeypatch)
    assert inside(tmp_path / "new", "--plan") == 0
    assert not jobs.asked
    assert not (tmp_path / "new").exists()
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == JOBS
    assert last == "8 jobs for 6 cells, 0 cells are done"
    after = [line for line in lines if "  after " in line]
    assert len(after) == 4
    assert {line.split()[0] for line in lines} == {"pretrain", "finetune"}
    assert sum("after few-idmm-tiny-s3" in line for line in after) == 2
    more = [
        *GRID["targets"],
        {
            "name": "digits",
            "label": "third",
            "subset": {"per_class": 3},
        },
    ]
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    assert inside(copied, "--plan", targets=more) == 0
    out = capsys.readouterr().out
    assert out.count("-to-third-") == 3 == len(out.splitlines()) - 1
    assert "3 jobs for 3 cells, 6 cells are done" in out
    assert "after" not in out
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_faults_are_found_before_the_first_job_all_together(tmp_path, monkeypatch, capsys):
    """Also what only a run would see: a batch that the method cannot divide, a grid too small for
    drloc."""
    jobs = Made(monkeypatch)
    out = tmp_path / "out"
    unlabelled = tmp_path / "flat"
    labelled = tree(tmp_path / "d", train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    for n in range(3):
        paint(unlabelled / f"train/{n}.png", n)
    out.mkdir()
    (out / "thesis.txt").touch()
    wrong = a_run(
        tmp_path / "wrong",
        kwargs={
            **VIT,
            "depth": 1,
            "num_classes": 0,
            "img_size": 16,
        },
    )
    faulty = {
        "sources": [
            {
                "name": "folder",
                "label": "flat",
                "root": str(unlabelled),
            },
            {"name": "folder", "label": "gone", "root": "/none"},
            {
                "name": "folder",
                "label": "fine",
                "root": str(labelled),
                "subset": {"total": 4},
            },
            "digitz",
        ],
        "targets": [
            "digits",
            {
                "name": "digits",
                "label": "big",
                "subset": {"per_class": 9999},
            },
        ],
        "methods": ["supcon", "imdd"],
        "backbones": [*GRID["backbones"], {"name": "resnet18", "kwargs": {"depth": 3}}, "resnet19"],
        "weights": [
            {
                "label": "IN",
                "path": str(wrong),
                "backbone": "tiny",
            }
        ],
    }
    assert inside(out, "--finetune.train.device", "mps", **faulty) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == ""
    assert not jobs.asked
    assert sorted(path.name for path in out.iterdir()) == ["thesis.txt"]
    beginnings = [
        "sources 'digitz': data.name: 'digitz' is not known,",
        "methods 'imdd': 'imdd' is not known,",
        f"out: '{out}' exists and is not empty. Name a new folder",
        "sources 'flat': ",
        "sources 'gone': data.root: '/none' does not exist,",
        "targets 'big': ",
        "backbones 'resnet18': model.kwargs: ",
        "backbones 'resnet19': model.name: 'resnet19' is unknown",
        "weights 'IN': model.kwargs: depth is 2, but ",
        "finetune: train.device: 'mps' is not available",
    ]
    for want in beginnings:
        assert any(line.startswith(want) for line in lines), output.err
    assert len(lines) == len(set(lines))
    assert "Traceback" not in output.err
    for line in lines:
        assert "'fine'" not in line.partition(":")[0]
    small = {
        "name": "digits",
        "label": "small",
        "subset": {"total": 1},
    }
    tuning = {
        **GRID["finetune"],
        "drloc": {"weight": 0.5},
        "train": {**GRID["finetune"]["train"], "size": 8},
    }
    assert (
        inside(
            tmp_path / "other",
            methods=["simclr", "imdd"],
            sources=[small],
            finetune=tuning,
        )
        == 2
    )
    output = capsys.readouterr().err
    assert (
        "sources 'small': data.root: 1 image to train on. Telling images apart needs at least 2"
        in output
    )
    assert "drloc.weight: at 8 px the final grid is 1x1" in output
    assert not jobs.asked


def test_a_folder_of_something_else_or_in_use(tmp_path, monkeypatch, capsys):
    jobs = Made(monkeypatch)
    a_run = tmp_path / "run"
    file = tmp_path / "file"
    out = tmp_path / "out"
    (a_run / "last").mkdir(parents=True)
    file.touch()
    for folder, line in (
        (a_run, f"out: '{a_run}' exists and is not empty. Name a new folder"),
        (file, f"out: cannot write '{file}', because '{file}' is not a folder. Name another place"),
    ):
        assert inside(folder) == 2
        assert capsys.readouterr().err == f"{line}\n"
    below = file / "below"
    assert call(f"transfer --config {tmp_path}/file.yaml --out {below}") == 2
    line = f"out: cannot write '{below}', because '{file}' is not a folder. Name another place\n"
    assert capsys.readouterr().err == line
    root = tree(tmp_path / "d", train={"a": 1})
    assert (
        inside(
            root / "train/grid",
            sources=[{"root": str(root / "train")}],
            targets=[{"root": str(root)}],
        )
        == 2
    )
    line = (
        f"out: '{root}/train/grid' lies among the images of '{root}/train' and would "
        "become one of their classes."
    )
    assert capsys.readouterr().err.count(line) == 1
    lock = Lock(out / ".lock")
    assert lock.acquire()
    assert inside(out) == 2
    assert not jobs.asked
    assert (
        capsys.readouterr().err
        == f"out: '{out}' is in use by another run. Wait for it or name another folder\n"
    )
    lock.release()
    assert inside(out) == 0


def status(out, capsys):
    call_ok(f"transfer status {out}")
    return capsys.readouterr().out.splitlines()


def test_status(tmp_path, monkeypatch, capsys):
    """Also from another folder than the one that the grid was started in."""
    jobs = Made(monkeypatch)
    running = []
    out = tmp_path / "out"
    jobs.instead = {
        "few-idmm-tiny": fail(RunError("nan")),
        "digits-idmm-s3": fail(Interrupted("enough")),
        "scratch-tiny-to-other": lambda: running.extend(status(out, capsys)),
    }
    (tmp_path / "recipe.yaml").write_text("train: {epochs: 5}")
    monkeypatch.chdir(tmp_path)
    changes = {"pretrain": {**GRID["pretrain"], "config": "recipe.yaml"}}
    assert inside("out", **changes) == 130
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert running[0].startswith("grid: ")
    assert any(
        line.startswith("  running, or killed: ") and line.endswith(", start 1") for line in running
    )
    assert status(out, capsys) == [
        "grid: 2 of 6 cells, 2 failed",
        f"  failed: few-idmm-tiny-s3: nan ({next(out.glob('runs/pretrain/few-*'))}/log.txt)",
        f"  results so far: {out / 'grid.md'}",
    ]
    jobs.instead.clear()
    monkeypatch.chdir(tmp_path)
    assert inside("out", **changes) == 0
    assert capsys.readouterr()
    # a job that ends now, and one that was killed with its result
    (out / "jobs/gone.started").symlink_to("removed")
    (out / f"jobs/{next(iter(runs(out)))}.started").write_text("1")
    assert status(out, capsys) == ["grid: 6 of 6 cells", f"  results so far: {out / 'grid.md'}"]


def test_probes_beside_fine_tuning(copied, whole_grid, tmp_path, capsys):
    before = stamps(copied)
    assert inside(copied, "--target.protocol", "probe") == 0
    assert "- probe: 6 of 6 cells done" in capsys.readouterr().out
    assert stamps(copied).items() >= before.items(), (
        "pretrainings and fine-tunings stay as they are"
    )
    assert len(runs(copied)) == JOBS + 6
    probes = {
        (c["source"], c["target"]): c for c in results(copied)["cells"] if c["protocol"] == "probe"
    }
    (source,) = copied.glob("runs/pretrain/few-*")
    argv = f"--init {source} --data.workers 0 --seed 3 --out {tmp_path}/p"
    call_ok(f"probe {argv} --data.subset '{{per_class: 2}}' --device cpu")
    by_hand = read(tmp_path / "p" / "result.json")
    cell = probes["few", "other"]
    assert cell["top1"] == by_hand["top1"]
    assert cell["knn"] == by_hand["knn"]
    assert cell["top5"] is None
    result = read(copied / cell["folder"] / "result.json")
    assert result["train_size"] == 20
    assert result["size"] == 16
    assert result["readouts"] == by_hand["readouts"]
    assert cell["source_size"] == 60
    assert cell["seconds"] == result["seconds"]
    scratch = read(copied / probes["scratch", "other"]["folder"] / "result.json")
    assert scratch["init"] is None
    assert scratch["seed"] == 3
    assert inside(copied) == 0
    assert cells(copied) == cells(whole_grid)
