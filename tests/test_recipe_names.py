"""Recipes by their names, from any folder; whose method section counts; what is logged before there is a folder."""

import logging

import pytest
import yaml
from helpers import ROOT, call, flags, inside, refused

from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig
from idmm.config.parsing import build, parse
from idmm.config.reading import recipes
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import GridPlan

CONFIGS = ROOT / "configs"
BARE = dict(method__classifier=None, method__classifier_init=None, method__classifier_lr_scale=None)
OF_IDMM = "method.label_smoothing, method.cutmix_alpha, method.classifier, method.classifier_lr_scale, "
OF_IDMM += "method.classifier_init: ignored from 'idmm_fast', as they belong to idmm and this run uses"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test here runs in a folder that is no checkout."""
    monkeypatch.chdir(tmp_path)


def parsed(kind, *names):
    return parse(kind, [word for name in names for word in ("--config", str(name))], "test")


# ------------------------------------------------------------------ names
@pytest.mark.parametrize("key", recipes())
def test_every_recipe_is_found_by_its_name(key):
    (folder, name), path = key.split("/"), CONFIGS / f"{key}.yaml"
    kinds = {"pretrain": PretrainConfig, "finetune": FinetuneConfig, "drloc": FinetuneConfig}
    kinds |= {"detect": DetectConfig, "segment": SegmentConfig}
    kind = kinds.get(name if folder == "digits" else folder, PretrainConfig)
    if folder == "transfer":
        grids = [parse(GridConfig, ["--config", str(at), "--out", "o", "--roots", "R"], "test") for at in (name, path)]
        assert grids[0] == grids[1] and GridPlan(grids[0]).checked().cells
        return
    wanted = parsed(kind, path)
    assert parsed(kind, key) == parsed(kind, f"{key}.yaml") == build(kind, key) == wanted
    if folder in kinds and folder != "drloc":
        assert parsed(kind, name) == wanted


def test_a_file_of_that_name_comes_first(tmp_path):
    (tmp_path / "paper").write_text("train: {epochs: 3}\n")
    (tmp_path / "idmm").mkdir()  # a folder is none
    assert parsed(FinetuneConfig, "paper").train.epochs == 3
    assert parsed(PretrainConfig, "idmm").train.epochs == 800


def test_no_such_recipe_is_a_line(capsys):
    line = "is neither a file nor a recipe. 'idmm configs' lists the recipes. Did you mean 'idmm_fast'?"
    assert refused(capsys, ["pretrain", "--config", "idm_fast"]) == [f"--config: 'idm_fast' {line}"]
    line = "is a recipe of idmm pretrain, not of this command. 'idmm configs' lists the recipes of each."
    for command in ("finetune", "train"):
        assert refused(capsys, [command, "--config", "idmm_fast"])[:1] == [f"--config: 'idmm_fast' {line}"]


def test_a_list_of_all(capsys):
    assert call(["configs"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) == len(recipes()) == len(list(CONFIGS.glob("*/*.yaml"))) and all(len(line) == 2 for line in lines)
    shown = dict(lines)
    assert shown["paper"] == "Fine-tuning of the paper's Table 2: 200 epochs at 224 px"
    assert (
        shown["drloc/resnet50"]
        == "ResNet-50 with the weight of drloc of T2T-ViT and CvT, as the paper does not give one"
    )


# ------------------------------------------------------------------ the method section of a recipe
def methods_of(*argv):
    return parse(PretrainConfig, list(argv), "test").method


def test_a_section_applies_to_its_own_method(caplog):
    caplog.set_level(logging.INFO, "idmm")
    simclr = parsed(PretrainConfig, "simclr").method
    assert methods_of("--config", "idmm_fast", "--config", "simclr") == simclr
    assert [record.getMessage() for record in caplog.records] == [f"{OF_IDMM} simclr"]
    caplog.clear()
    found = parse(PretrainConfig, ["--config", "idmm_fast", "--method.name", "simclr"], "test")
    assert found.method == PretrainConfig(method=type(simclr)(name="simclr")).method
    assert (found.train.epochs, found.train.batch_size) == (100, 64), "the rest of the recipe stays"
    assert len(caplog.records) == 1
    caplog.clear()
    assert methods_of("--config", "idmm_fast", "--method.name", "idmm").classifier == "cosine"
    assert methods_of("--config", "dino", "--config", "dino_idmm").teacher_temperature == 0.04
    assert not caplog.records


def test_sections_of_one_method_add_up(tmp_path, caplog):
    caplog.set_level(logging.INFO, "idmm")
    assert methods_of("--config", "idmm", "--config", "ablations/table8_1_insdis").label_smoothing == 0
    bare = methods_of("--config", "simclr", "--config", "ablations/table9_simclr_without_mlp")
    assert (bare.name, bare.projection, bare.dim) == ("simclr", False, None)
    (tmp_path / "mine.yaml").write_text("method: {temperature: 0.3}\n")
    assert methods_of("--config", "mine.yaml", "--method.name", "simclr").temperature == 0.3, "for any"
    assert not caplog.records
    found = methods_of("--config", "idmm", "--config", "ablations/table8_1_insdis", "--config", "simclr")
    assert found == parsed(PretrainConfig, "simclr").method and len(caplog.records) == 2


def test_in_a_grid_with_one_recipe(tmp_path):
    """Two methods, a recipe of one of them: no fault, the key is told once, and the other is as by default."""
    config = {"sources": ["digits"], "targets": ["digits"], "methods": ["idmm", "simclr"], "seeds": [0, 1]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**config, "pretrain": {"config": "idmm_fast"}}))
    plan = GridPlan(parse(GridConfig, ["--config", "grid.yaml", "--out", "o"], "test")).checked()
    assert list(plan.notes) == [f"{OF_IDMM} simclr"]
    configs = {job.config["method"]["name"]: job.config for job in plan.jobs.values() if job.stage == "pretrain"}
    found = {
        name: (config["method"].get("classifier"), len(config["views"]["crops"])) for name, config in configs.items()
    }
    assert found == {"idmm": ("cosine", 1), "simclr": (None, 1)}, "the recipe's light crops"
    own = GridPlan(build(GridConfig, {**config, "out": "o", "pretrain": {"method": {"classifier": "cosine"}}})).faults
    line = "method.classifier: got 'cosine', but simclr has no such option. Leave it out."
    assert own == [f"pretrain: {line}"], "what the user wrote is still one"


# ------------------------------------------------------------------ the log before there is a folder
def test_what_is_logged_before_the_folder_is_there_stands_in_its_log_once(tmp_path, capsys):
    given = {**BARE, "train__epochs": 1, "train__accumulate": None}
    argv = flags("pretrain", tmp_path / "run", **given, method__name="supervised")
    assert call(["pretrain", "--config", "idmm_fast", *argv]) == 0
    for text in (capsys.readouterr().err, (tmp_path / "run" / "log.txt").read_text()):
        assert text.count(f"{OF_IDMM} supervised") == 1
    assert inside("pretrain", tmp_path / "other", **given) == 0
    assert "ignored from" not in (tmp_path / "other" / "log.txt").read_text()
