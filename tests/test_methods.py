"""Randomness, mixing, IDMM and fine-tuning as modules, against the maths written out; features and
their measures."""

import contextlib

import numpy as np
import pytest
import torch
from helpers import run_info
from numpy.random import default_rng

from idmm import config
from idmm.evaluation import evaluate
from idmm.evaluation.network import extract_features
from idmm.losses import instance_discrimination_loss
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.methods.mixing import draw_cutmix, draw_mixup, mix_images
from idmm.models import create_backbone
from idmm.seeding import numpy_rng, seeded

TINY = dict(
    patch_size=8,
    embed_dim=16,
    depth=1,
    num_heads=2,
)


def backbone(classes=0, **kwargs):
    with seeded(0):
        return create_backbone("vit_tiny_patch16_224", 16, **TINY, num_classes=classes, **kwargs)


def batch(n=4, instances=7):
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(n, count, 3, 16, 16, generator=generator) for count in (2, 3)]
    return {"views": views, "index": torch.randperm(instances, generator=generator)[:n]}


def test_loss_is_the_sum_of_group_means_each_mixed_on_its_own():
    method = IDMM(backbone(), run_info(7), config.METHODS["idmm"]()).double()
    inputs = batch()
    inputs["views"] = [v.double() for v in inputs["views"]]
    loss = method(inputs, key=5, epoch=0)["loss"]
    total = 0.0
    for number, views in enumerate(inputs["views"]):
        count = views.shape[1]
        flat = views.reshape(-1, 3, 16, 16)
        target = torch.tensor([int(i) for i in inputs["index"] for _ in range(count)])
        mix = draw_cutmix(len(flat), 16, 16, 0.5, numpy_rng(5, "cutmix", number))
        z = method.backbone(mix_images(flat, mix)).float()
        w = method.classifier.weight
        total = total + instance_discrimination_loss(
            z, w, target, target[mix.partner], mix.lam, 0.1
        )
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-6)


def test_finetune_with_one_kind_of_mixing_uses_it_on_all_epochs():
    images = torch.randn(4, 3, 16, 16)
    for augment, kind in (
        (config.Augment(cutmix_alpha=0), None),
        (config.Augment(mixup_alpha=0), tuple),
    ):
        method = Finetune(backbone(3), augment)
        for epoch in (0, 1):
            mix = method._draw(images, epoch, numpy_rng(0, "x"))
            assert (mix.box is None) == (kind is None)


def test_mixing_by_batches_draws_mixup_or_cutmix_for_each():
    images = torch.randn(4, 3, 16, 16)
    method = Finetune(backbone(3), config.Augment(mixing="batches"))
    for epoch in (0, 1):
        blends = [
            method._draw(images, epoch, numpy_rng(step, "mixing")).box is None
            for step in range(100)
        ]
        assert 35 <= sum(blends) <= 65


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_frozen_backbone_trains_its_classifier_alone(name):
    with seeded(0):
        model = create_backbone(
            name,
            16,
            **TINY,
            num_classes=3,
            proj_drop_rate=0.5,
        )
    method = Finetune(model, config.Augment(), freeze=True).train()
    trained = {n for n, p in method.named_parameters() if p.requires_grad}
    assert trained
    for n in trained:
        assert n.startswith("backbone.head")
    assert not model.training  # no dropout, fixed batch statistics
    method({"images": torch.randn(4, 3, 16, 16), "label": torch.arange(4) % 3}, 0, 0)[
        "loss"
    ].backward()
    assert {n for n, p in method.named_parameters() if p.grad is not None} == trained


def test_accuracy_counts_over_uneven_batches():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(23, 8, generator=generator)
    label = torch.randint(8, (23,), generator=generator)
    order = torch.randperm(23, generator=generator)  # of several processes, images come in no order
    batches = [
        {
            "images": logits[i],
            "label": label[i],
            "index": i,
        }
        for i in order.split(5)
    ]
    model = torch.nn.Identity().train()  # a classifier whose answers are known
    predictions = evaluate.predict(model, batches, "cpu")
    assert predictions.truth.tolist() == label.tolist()
    assert predictions.predicted.tolist() == logits.argmax(1).tolist()
    scores = predictions.scores()
    top1 = np.mean([int(row.argmax()) == int(y) for row, y in zip(logits, label, strict=True)])
    top5 = np.mean(
        [int(y) in row.argsort(descending=True)[:5] for row, y in zip(logits, label, strict=True)]
    )
    assert (scores["top1"], scores["top5"]) == pytest.approx((100 * top1, 100 * top5))
    assert model.training


def test_a_process_without_an_image_takes_part(monkeypatch):
    other = [
        (
            np.array([1, 0]),
            np.ones((2, 12)),
        )
    ]
    monkeypatch.setattr("idmm.distributed.gather", lambda own: [own, other, []])
    assert extract_features(backbone(), [], "cpu", contextlib.nullcontext).shape == (2, 12)


def test_share_is_that_of_the_pixels_left_outside_the_box():
    for seed in range(200):
        mix = draw_cutmix(4, 17, 23, 0.5, default_rng(seed))
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= 17
        assert 0 <= left <= right <= 23
        images = torch.arange(4.0)[:, None, None, None].expand(4, 1, 17, 23)
        mixed = mix_images(images, mix)
        shares = (mixed == images).double().mean((1, 2, 3))
        for i in range(4):
            assert float(shares[i]) == pytest.approx(1.0 if mix.partner[i] == i else mix.lam)


def test_larger_share_stays_and_a_clipped_box_only_raises_it():
    shares = []
    for seed in range(300):
        share = default_rng(seed).beta(0.5, 0.5)
        mix = draw_cutmix(2, 64, 64, 0.5, default_rng(seed))
        assert mix.lam >= max(share, 1 - share) - 1e-9
        shares.append(mix.lam)
    assert 0.5 <= min(shares) < 0.6
    assert max(shares) > 0.99


def test_partners_are_a_permutation():
    for draw in (
        lambda rng: draw_cutmix(11, 8, 8, 0.5, rng),
        lambda rng: draw_mixup(11, 0.5, rng),
    ):
        partner = draw(default_rng(0)).partner
        assert sorted(partner.tolist()) == list(range(11))
        assert partner.tolist() != list(range(11))


def test_orders_differ_from_epoch_to_epoch():
    orders = [numpy_rng(0, "order", epoch).permutation(50) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(50))
    assert not np.array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(numpy_rng(0, "order", 1).permutation(50), orders[1])
    assert numpy_rng(0, "a").random() != numpy_rng(0, "b").random()
