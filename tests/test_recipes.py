"""Recipes: shipped configs against the paper's tables, by their names from any folder; what is
fitted to small data."""

import importlib.util
import logging
from dataclasses import replace

import pytest
from folders import faults
from helpers import ROOT, call_ok, inside, read, refused, run_info
from tiny import make

from idmm.config import (
    METHODS,
    CropGroup,
    DetectConfig,
    FinetuneConfig,
    PretrainConfig,
    PretrainTrain,
    SegmentConfig,
    Views,
    global_groups,
)
from idmm.config.data import colours_of
from idmm.config.parsing import build, flatten, parse, to_dict
from idmm.config.reading import recipes
from idmm.grid.config import GridConfig

CONFIGS = ROOT / "configs"
TABLE_10 = {  # optimizer, batch, lr, weight decay, width, temperature, queue
    "mocov2": ("sgd", 256, 5e-4, 1e-3, 256, 0.2, 2048),
    "mocov3": ("adamw", 256, 1.5e-4, 0.1, 256, 0.2, None),
    "simclr": ("sgd", 512, 5e-4, 1e-3, 256, 0.1, None),
    "supcon": ("sgd", 512, 5e-4, 1e-3, 256, 0.1, None),
    "dino": ("adamw", 512, 5e-4, 0.04, 256, 0.1, None),
}
STRONG = [0.8, 0.8, 0.8, 0.2]
FLAT = [0.4, 0.4, 0.4, 0.1]
BYOL = [0.4, 0.4, 0.2, 0.1]


def pair(low):
    return [
        (1, [low, 1.0], 1.0, 0.0),
        (1, [low, 1.0], 0.1, 0.2),
    ]


OWN = {  # of the methods' releases: jitter; count, scale, blur and solarize of each group; warm-up
    "idmm": (
        STRONG,
        [
            (2, [0.14, 1.0], 0.5, 0.0),
            (4, [0.05, 0.4], 0.5, 0.0),
        ],
        None,
    ),
    "simclr": (STRONG, [(2, [0.2, 1.0], 0.5, 0.0)], None),
    "mocov2": (FLAT, [(2, [0.2, 1.0], 0.5, 0.0)], 0),
    "mocov3": (BYOL, pair(0.08), 40),
    "dino": (BYOL, [*pair(0.25), (4, [0.05, 0.25], 0.5, 0.0)], 10),
    "dino_idmm": (BYOL, [*pair(0.4), (2, [0.05, 0.4], 0.5, 0.0)], 10),
}


def shipped(*paths):
    """A config from files under ``configs``, one over the other, resolved."""
    argv = [word for path in paths for word in ("--config", str(CONFIGS / f"{path}.yaml"))]
    return parse(PretrainConfig, argv, "test").fill_from_method()[0]


def resolved(crops=None, name="idmm", **method):
    views = Views(crops=None if crops is None else [CropGroup(count=n) for n in crops])
    return build(
        PretrainConfig, {"method": {"name": name, **method}, "views": views}
    ).fill_from_method()


def method_faults(**changes):
    return faults(resolved, **changes)


def differences(a, b):
    a = flatten(to_dict(a))
    b = flatten(to_dict(b))
    return {key for key in a if a[key] != b[key]}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_its_config(name):
    """800 epochs at 112 px, a cosine; crops and the method's fields are what null means, so it
    changes by one word."""
    config = shipped(f"pretrain/{name}")
    assert config.method.name == name
    assert config.train.epochs == 800
    assert config.views.size == 112
    assert config.train.schedule == "cosine"
    assert config.model.name is None
    assert not config.model.kwargs, "those of --init's weights, else the default"
    plainly, _ = resolved(name=name)
    assert config.views == plainly.views
    assert config.train.warmup_epochs == plainly.train.warmup_epochs
    assert config.method == (
        replace(plainly.method, dim=256) if name in TABLE_10 else plainly.method
    )


@pytest.mark.parametrize("name", OWN)
def test_each_method_has_its_own_views_and_warmup(name):
    jitter, groups, warmup = OWN[name]
    config = shipped(f"pretrain/{name}")
    colour_settings = [colours_of(group, config.views) for group in config.views.crops]
    settings = [
        (g.count, g.scale, c.blur_prob, c.solarize_prob)
        for g, c in zip(config.views.crops, colour_settings, strict=True)
    ]
    assert settings == groups
    assert config.train.warmup_epochs == warmup
    for colours in colour_settings:
        assert colours.jitter == jitter
        assert colours.jitter_prob == 0.8
        assert colours.grey_prob == 0.2
        assert colours.flip == 0.5


def test_dinos_configs():
    """The release's schedule of weight decay and its clipping of each tensor; the IDMM authors'
    settings beside it."""
    release = shipped("pretrain/dino")
    paper = shipped("pretrain/dino_idmm")
    assert release.train.weight_decay == 0.04
    assert release.train.weight_decay_end == 0.4
    assert release.train.clip_grad == 3.0
    assert release.train.clip_grad_mode == "tensor"
    assert differences(release, paper) == {"method.teacher_temperature", "views.crops"}
    assert release.method.teacher_temperature == 0.07
    assert paper.method.teacher_temperature == 0.04
    assert [global_groups(config.views.crops) for config in (release, paper)] == [2, 2]
    grid = read(CONFIGS / "transfer" / "table6.yaml")
    files = {m["name"]: m["pretrain"]["config"] for m in grid["methods"] if m != "idmm"}
    assert files["dino"] == "dino_idmm"
    assert files["mocov3"] == "mocov3"


@pytest.mark.parametrize("name", TABLE_10)
def test_table_10(name):
    *optimization, dim, temperature, queue = TABLE_10[name]
    config = shipped(f"pretrain/{name}")
    train = config.train
    assert [train.optimizer, train.batch_size, train.lr, train.weight_decay] == optimization
    assert config.method.dim == dim
    assert config.method.temperature == temperature
    if queue is not None:
        assert config.method.queue is None
        large = make(name, info=run_info(10_000, batch_size=train.batch_size))
        assert large.loss.memory_bank.size == (queue, dim)


def test_null_is_filled_in_and_said():
    config, notes = resolved(name="mocov2", momentum=0.9)
    method = config.method
    assert method.projection is True
    assert method.temperature == 0.2
    assert method.momentum == 0.9
    assert method.queue is None
    assert "views.crops: 2 of 0.2 to 1 of the area, mocov2's" in notes
    assert "views.jitter: [0.4, 0.4, 0.4, 0.1], mocov2's" in notes
    assert "train.warmup_epochs: 0, mocov2's" in notes
    assert config.fill_from_method() == (config, []), "once is enough"
    assert (
        resolved(
            name="dino",
            momentum=0.0,
            crops=[2],
        )[0].method.momentum
        == 0
    ), "0 is not null"


def test_views_that_are_given_come_before_the_methods():
    chosen = Views(blur_prob=0.3, jitter=[0.1, 0.1, 0.1, 0.0])
    config = PretrainConfig(
        method=METHODS["mocov3"](), views=chosen, train=PretrainTrain(warmup_epochs=3)
    )
    config, notes = config.fill_from_method()
    assert [colours_of(group, config.views).blur_prob for group in config.views.crops] == [
        0.3,
        0.3,
    ], "for all crops"
    assert [colours_of(group, config.views).solarize_prob for group in config.views.crops] == [
        0.0,
        0.2,
    ]
    assert config.views.jitter == [0.1, 0.1, 0.1, 0.0]
    assert config.train.warmup_epochs == 3
    for note in notes:
        assert not ("jitter" in note or "warmup" in note)


def test_groups_carry_any_colour_and_are_checked():
    argv = [
        "--views.crops",
        "[{count: 1, jitter: [0.1, 0.1, 0.1, 0.9]}, {flip: 2}, {scale: [2, 1]}, {jiter: 1}]",
    ]
    assert faults(parse, PretrainConfig, argv, "test") == [
        "views.crops[0].jitter: got [0.1, 0.1, 0.1, 0.9], expected four numbers >= 0, the "
        "last (hue) <= 0.5",
        "views.crops[1].flip: got 2, expected less than or equal to 1",
        "views.crops[2].scale: got [2.0, 1.0], expected [min, max] with 0 < min <= max <= 1",
        "views.crops[3].jiter: unknown key. Did you mean 'views.crops[3].jitter'?",
    ]
    crops = [
        {
            "count": 1,
            "scale": [0.2, 1.0],
            "grey_prob": 0.0,
        }
    ]
    assert to_dict(parse(PretrainConfig, ["--views.crops", str(crops)], "test"))["views"][
        "crops"
    ] == [
        {
            "grey_prob": 0.0,
            "count": 1,
            "scale": [0.2, 1.0],
        }
    ], "what is left out is not written down"


def test_crops_that_a_method_compares():
    for crops in ([1], [2, 1]):
        line = (
            f"views.crops: got {sum(crops)} crops per image, but simclr compares crops, expected 2"
        )
        assert method_faults(name="simclr", crops=crops) == [line]
    assert method_faults(name="dino", crops=[1]) == [
        "views.crops: got 1 crops per image, but dino compares crops, expected at least 2"
    ]
    resolved(name="dino", crops=[1, 4])
    resolved(name="idmm", crops=[1, 4])


BARE = dict(
    method__classifier=None,
    method__classifier_init=None,
    method__classifier_lr_scale=None,
    views__crops=None,
)


def test_a_missing_library(tmp_path, monkeypatch, capsys):
    """idmm needs it for an MLP alone."""
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "lightly" else original(name, *a),
    )
    resolved(name="idmm")
    line = "needs lightly. Install it with: pip install -e '.[baselines]'"
    assert method_faults(name="idmm", projection=True) == [f"method.name: idmm: {line}"]
    assert inside("pretrain", tmp_path / "run", **BARE, method__name="simclr") == 2
    assert capsys.readouterr().err.splitlines() == [f"method.name: simclr: {line}"]
    assert not (tmp_path / "run").exists()


def logged_method(name, caplog, images, **fields):
    run = {key: fields.pop(key) for key in ("batch_size", "epochs") if key in fields}
    caplog.clear()
    with caplog.at_level(logging.INFO, "idmm"):
        method = make(name, info=run_info(images, **run), **fields)
    return method, [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(
    "images, batch_size, length",
    [
        (1000, 256, 744),
        (2304, 256, 2048),
        (96, 96, 48),
    ],
)
@pytest.mark.parametrize("queue", [None, 2048])
def test_the_queue_is_shorter_than_the_data(images, batch_size, length, queue, caplog):
    method, messages = logged_method("mocov2", caplog, images, batch_size=batch_size, queue=queue)
    assert method.loss.memory_bank.bank.shape == (length, 256)
    assert length < images
    line = f"method.queue: {length}, not 2048: there are {images} images"
    assert messages == ([("INFO", line)] if length < 2048 else [])


def test_dinos_outputs_are_as_many_as_images(caplog):
    method, messages = logged_method("dino", caplog, 37, outputs=None, epochs=800)
    assert method.head.last_layer.weight.shape == (37, 6)
    assert method.loss.center.shape == (1, 1, 37)
    assert messages == [("INFO", "method.outputs: 37, the number of images, not 65536")]


@pytest.mark.parametrize(
    "epochs, warmup, still",
    [
        (800, 30, 1),
        (9, 0, 0),
    ],
)
def test_dinos_warm_ups_are_a_tenth_of_a_short_run(epochs, warmup, still, caplog):
    method, _ = logged_method("dino", caplog, 37, epochs=epochs)
    assert method.warmup == warmup
    assert method.head.freeze_last_layer == still


OF_IDMM = (
    "method.label_smoothing, method.cutmix_alpha, method.classifier, method.classifier_lr_scale, "
)
OF_IDMM += (
    "method.classifier_init: ignored from 'idmm_fast', as they belong to idmm and this run uses"
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test here runs in a folder that is no checkout."""
    monkeypatch.chdir(tmp_path)


def parsed(kind, *names):
    return parse(kind, [word for name in names for word in ("--config", str(name))], "test")


@pytest.mark.parametrize("key", recipes())
def test_every_recipe_is_found_by_its_name(key):
    (folder, name), path = key.split("/"), CONFIGS / f"{key}.yaml"
    kinds = {"pretrain": PretrainConfig, "finetune": FinetuneConfig, "drloc": FinetuneConfig}
    kinds |= {"detect": DetectConfig, "segment": SegmentConfig}
    kind = kinds.get(name if folder == "digits" else folder, PretrainConfig)
    if folder == "transfer":
        grids = [
            parse(GridConfig, ["--config", str(at), "--out", "o", "--roots", "R"], "test")
            for at in (name, path)
        ]
        assert grids[0] == grids[1]  # tests/test_papers.py plans them
        return
    expected = parsed(kind, path)
    assert parsed(kind, key) == parsed(kind, f"{key}.yaml") == build(kind, key) == expected
    if folder in kinds and folder != "drloc":
        assert parsed(kind, name) == expected


def test_no_such_recipe_is_a_line(capsys):
    line = (
        "is neither a file nor a recipe. 'idmm configs' lists the recipes. Did you mean "
        "'idmm_fast'?"
    )
    assert refused(capsys, "pretrain --config idm_fast") == [f"--config: 'idm_fast' {line}"]
    line = (
        "is a recipe of idmm pretrain, not of this command. 'idmm configs' lists the "
        "recipes of each."
    )
    for command in ("finetune", "train"):
        assert refused(capsys, f"{command} --config idmm_fast")[:1] == [
            f"--config: 'idmm_fast' {line}"
        ]


def test_a_list_of_all(capsys):
    call_ok("configs")
    lines = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            lines.append(line.split(maxsplit=1))
    assert len(lines) == len(recipes()) == len(list(CONFIGS.glob("*/*.yaml")))
    shown = dict(lines)
    assert shown["paper"] == "Fine-tuning of the paper's Table 2: 200 epochs at 224 px"


def methods_of(*argv):
    return parse(PretrainConfig, list(argv), "test").method


def test_a_section_applies_to_its_own_method(caplog):
    caplog.set_level(logging.INFO, "idmm")
    simclr = parsed(PretrainConfig, "simclr").method
    assert methods_of("--config", "idmm_fast", "--config", "simclr") == simclr
    assert [record.getMessage() for record in caplog.records] == [f"{OF_IDMM} simclr"]
    caplog.clear()
    switched = parse(PretrainConfig, ["--config", "idmm_fast", "--method.name", "simclr"], "test")
    assert switched.method == PretrainConfig(method=type(simclr)(name="simclr")).method
    assert switched.train.epochs == 100
    assert switched.train.batch_size == 64, "the rest of the recipe stays"
    assert len(caplog.records) == 1
    caplog.clear()
    assert methods_of("--config", "idmm_fast", "--method.name", "idmm").classifier == "cosine"
    assert not caplog.records
