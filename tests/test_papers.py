"""The papers' tables and recipes: each table has its line in docs/reproduce.md, and its jobs are planned."""

import pytest

from idmm.config import FinetuneConfig
from idmm.config.parsing import parse
from idmm.models import create_backbone


def recipe(*names):
    return parse(FinetuneConfig, [word for name in names for word in ("--config", name)], "test")


@pytest.mark.parametrize("protocol", ["scratch", "finetune"])
@pytest.mark.parametrize(
    ("network", "drop_path", "weight", "kwargs"),
    [
        ("swin_tiny_own", 0.2, 0.5, {}),
        ("t2t_vit_14", 0.1, 0.1, {}),
        ("cvt_13", 0.1, 0.1, {}),
        ("vit_base_own", 0.0, 0.01, {"proj_drop_rate": 0.1}),
        ("resnet50_own", 0.0, 0.1, {}),
    ],
)
def test_own_recipes_of_drloc(protocol, network, drop_path, weight, kwargs):
    """Of the networks' releases. Optimization is the paper's, as in the recipes with IDMM's augmentation."""
    config = recipe(f"drloc/{protocol}_own", f"drloc/{network}")
    augment, model = config.augment, config.model
    assert (augment.random_erasing, augment.mixup_alpha, augment.cutmix_alpha) == (0.25, 0.8, 1.0)
    assert (augment.mixing, augment.randaugment) == ("batches", "rand-m9-mstd0.5-inc1")
    assert (augment.jitter_prob, augment.grey_prob, augment.label_smoothing) == (0.0, 0.0, 0.1)
    assert (model.drop_path, config.drloc.weight, model.kwargs) == (drop_path, weight, kwargs)
    usual = recipe({"scratch": "drloc/scratch_100", "finetune": "drloc/finetune"}[protocol])
    changed = {name for name, value in vars(config.train).items() if value != getattr(usual.train, name)}
    assert changed == {"clip_grad"} and config.train.clip_grad == 5.0


def test_pvt_v2_of_0_8_million_parameters():
    model = recipe("backbone/pvt_v2_08m").model
    counts = []
    for classes in (0, 102):
        network = create_backbone(model.name, 224, num_classes=classes, **model.kwargs)
        counts.append(sum(parameter.numel() for parameter in network.parameters()))
    assert counts == [771_680, 784_838]
