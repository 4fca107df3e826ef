"""Randomness, mixing, IDMM and fine-tuning as modules, against the maths written out; features and their measures."""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import run_info

from idmm import config
from idmm.evaluation import evaluate
from idmm.evaluation.network import extract_features
from idmm.losses import instance, instance_discrimination_loss
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.methods.mixing import Mix, draw_cutmix, draw_mixup, mix_images
from idmm.models import create_backbone
from idmm.seeding import derive, numpy_rng, seeded, uniforms

TINY = dict(patch_size=8, embed_dim=16, depth=1, num_heads=2)


def backbone(classes=0, **kwargs):
    with seeded(0):
        return create_backbone("vit_tiny_patch16_224", 16, **TINY, num_classes=classes, **kwargs)


def batch(n=4, instances=7):
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(n, count, 3, 16, 16, generator=generator) for count in (2, 3)]
    return {"views": views, "index": torch.randperm(instances, generator=generator)[:n]}


def test_loss_is_the_sum_of_the_groups_means_each_mixed_on_its_own(monkeypatch):
    method = IDMM(backbone(), run_info(7), config.METHODS["idmm"]()).double()
    given = batch()
    given["views"] = [v.double() for v in given["views"]]
    loss = method(given, key=5, epoch=0)["loss"]
    total = 0.0
    for number, views in enumerate(given["views"]):
        count = views.shape[1]
        flat = views.reshape(-1, 3, 16, 16)
        target = torch.tensor([int(i) for i in given["index"] for _ in range(count)])
        mix = draw_cutmix(len(flat), 16, 16, 0.5, numpy_rng(5, "cutmix", number))
        z = method.backbone(mix_images(flat, mix)).float()
        w = method.classifier.weight
        total = total + instance_discrimination_loss(z, w, target, target[mix.partner], mix.lam, 0.1)
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(instance, "LOGITS_HELD", 0)  # by tiles of logits, of all groups at once
    torch.testing.assert_close(method(given, key=5, epoch=0)["loss"], total, rtol=1e-5, atol=1e-6)


def test_finetune_with_one_kind_of_mixing_uses_it_on_all_epochs():
    images, label = torch.randn(4, 3, 16, 16), torch.arange(4) % 3
    for augment, kind in ((config.Augment(cutmix_alpha=0), None), (config.Augment(mixup_alpha=0), tuple)):
        method = Finetune(backbone(3), augment)
        for epoch in (0, 1):
            mix = method._draw(images, epoch, numpy_rng(0, "x"))
            assert (mix.box is None) == (kind is None)
    plain = Finetune(backbone(3), config.Augment(mixup_alpha=0, cutmix_alpha=0, label_smoothing=0)).eval()
    loss = plain({"images": images, "label": label}, 0, 0)["loss"]
    torch.testing.assert_close(loss, F.cross_entropy(plain.backbone(images), label))


def test_mixing_by_batches_draws_mixup_or_cutmix_for_each():
    images = torch.randn(4, 3, 16, 16)
    method = Finetune(backbone(3), config.Augment(mixing="batches"))
    for epoch in (0, 1):
        blends = [method._draw(images, epoch, numpy_rng(step, "mixing")).box is None for step in range(100)]
        assert 35 <= sum(blends) <= 65
    only = Finetune(backbone(3), config.Augment(mixing="batches", cutmix_alpha=0))
    assert all(only._draw(images, 1, numpy_rng(step, "mixing")).box is None for step in range(9))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_frozen_backbone_trains_its_classifier_alone(name):
    with seeded(0):
        model = create_backbone(name, 16, **TINY, num_classes=3, proj_drop_rate=0.5)
    method = Finetune(model, config.Augment(), freeze=True).train()
    trained = {n for n, p in method.named_parameters() if p.requires_grad}
    assert trained and all(n.startswith("backbone.head") for n in trained)
    assert not model.training  # no dropout, fixed batch statistics
    method({"images": torch.randn(4, 3, 16, 16), "label": torch.arange(4) % 3}, 0, 0)["loss"].backward()
    assert {n for n, p in method.named_parameters() if p.grad is not None} == trained


def test_accuracy_counts_over_uneven_batches():
    generator = torch.Generator().manual_seed(0)
    logits, label = torch.randn(23, 8, generator=generator), torch.randint(8, (23,), generator=generator)
    order = torch.randperm(23, generator=generator)  # of several processes, images come in no order
    batches = [{"images": logits[i], "label": label[i], "index": i} for i in order.split(5)]
    model = torch.nn.Identity().train()  # a classifier whose answers are known
    predictions = evaluate.predict(model, batches, "cpu")
    assert predictions.truth.tolist() == label.tolist() and predictions.predicted.tolist() == logits.argmax(1).tolist()
    found = predictions.scores()
    del found["top1_interval"]
    top1 = np.mean([int(row.argmax()) == int(y) for row, y in zip(logits, label, strict=True)])
    top5 = np.mean([int(y) in row.argsort(descending=True)[:5] for row, y in zip(logits, label, strict=True)])
    each = [(logits[label == k].argmax(1) == k).double().mean() for k in label.unique()]
    assert found == pytest.approx({"top1": 100 * top1, "top5": 100 * top5, "mean_per_class": 100 * np.mean(each)})
    assert found["mean_per_class"] != pytest.approx(found["top1"])
    assert model.training
    few = [{"images": torch.eye(3), "label": torch.arange(3), "index": torch.arange(3)}]
    three = evaluate.predict(model, few, "cpu").scores()
    assert (three["top1"], three["top5"], three["mean_per_class"]) == (100, 100, 100)


def test_a_process_without_an_image_takes_part(monkeypatch):
    other = [(np.array([1, 0]), np.ones((2, 12)))]
    monkeypatch.setattr("idmm.distributed.gather", lambda own: [own, other, []])
    assert extract_features(backbone(), [], "cpu", contextlib.nullcontext).shape == (2, 12)


def test_knn_is_a_vote_weighted_by_similarity():
    rng = np.random.default_rng(0)
    train, labels, test = rng.normal(size=(40, 6)), rng.integers(0, 3, 40), rng.normal(size=(15, 6))
    guesses = []
    for x in test:
        similarity = train @ x / np.linalg.norm(train, axis=1) / np.linalg.norm(x)
        near = np.argsort(-similarity)[:5]
        votes = [np.exp(similarity[near][labels[near] == c] / 0.07).sum() for c in range(3)]
        guesses.append(int(np.argmax(votes)))
    assert (evaluate.knn_predict(train, labels, test, k=5) == guesses).all()
    assert (
        np.mean(evaluate.knn_predict(train, labels, train, k=500) == labels) > 0.99
    )  # k is cut to the images there are


def test_probe_finds_what_is_linearly_there_whatever_its_scale():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    features = rng.normal(size=(300, 4))
    features[:, 0] = 1e-4 * (labels + 0.1 * rng.normal(size=300))
    features[:, 1] = 1e-4 * (labels == 1)
    found = evaluate.probe_predict(features[:200], labels[:200], features[200:])
    assert (found == labels[200:]).mean() > 0.95


def test_share_is_that_of_the_pixels_left_outside_the_box():
    for seed in range(200):
        mix = draw_cutmix(4, 17, 23, 0.5, np.random.default_rng(seed))
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= 17 and 0 <= left <= right <= 23
        own = torch.arange(4.0)[:, None, None, None].expand(4, 1, 17, 23)
        mixed = mix_images(own, mix)
        kept = (mixed == own).double().mean((1, 2, 3))
        for i in range(4):
            assert float(kept[i]) == pytest.approx(1.0 if mix.partner[i] == i else mix.lam)


def test_larger_share_stays_and_a_clipped_box_only_raises_it():
    shares = []
    for seed in range(300):
        drawn = np.random.default_rng(seed).beta(0.5, 0.5)
        mix = draw_cutmix(2, 64, 64, 0.5, np.random.default_rng(seed))
        assert mix.lam >= max(drawn, 1 - drawn) - 1e-9
        shares.append(mix.lam)
    assert 0.5 <= min(shares) < 0.6 and max(shares) > 0.99


def test_partners_are_a_permutation():
    for draw in (lambda rng: draw_cutmix(11, 8, 8, 0.5, rng), lambda rng: draw_mixup(11, 0.5, rng)):
        partner = draw(np.random.default_rng(0)).partner
        assert sorted(partner.tolist()) == list(range(11))
        assert partner.tolist() != list(range(11))


def test_mixing_takes_the_partners_pixels_and_leaves_its_input_alone():
    images = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    mixed = mix_images(images, Mix(0.5, torch.tensor([2, 0, 1]), (1, 4, 2, 6)))
    for i, partner in enumerate([2, 0, 1]):
        for y in range(6):
            for x in range(6):
                inside = 1 <= y < 4 and 2 <= x < 6
                assert torch.equal(mixed[i, :, y, x], images[partner if inside else i, :, y, x])
    blended = mix_images(images, Mix(0.75, torch.tensor([2, 0, 1]), None))
    torch.testing.assert_close(blended[0], 0.75 * images[0] + 0.25 * images[2])
    assert torch.equal(images, before)


def test_every_argument_counts_and_nothing_else():
    keys = [derive(0, "views"), derive(1, "views"), derive(0, "order"), derive(0, "views", 1), derive(0, "views", 1, 2)]
    keys.append(derive(0, "views", 12))
    assert len(set(keys)) == len(keys)
    random.seed(5)
    assert derive(0, "views", 1) == derive(0, "views", np.int64(1))
    assert all(0 <= key < 2**63 for key in keys)


def test_a_rows_numbers_do_not_depend_on_the_other_rows():
    key = derive(3, "views", 7)
    all_rows = uniforms(key, np.arange(100), 8)
    np.testing.assert_array_equal(uniforms(key, np.array([42, 7]), 8), all_rows[[42, 7]])
    np.testing.assert_array_equal(uniforms(key, np.array([42]), 3), all_rows[[42], :3])


def test_orders_differ_from_epoch_to_epoch():
    orders = [numpy_rng(0, "order", epoch).permutation(50) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(numpy_rng(0, "order", 1).permutation(50), orders[1])
    assert numpy_rng(0, "a").random() != numpy_rng(0, "b").random()


def test_seeded_blocks_are_repeatable_and_leave_the_global_state_alone():
    def draw():
        return random.random(), np.random.rand(), float(torch.rand(1))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with seeded(9):
        first = draw()
    assert draw() == wanted
    with seeded(9):
        assert draw() == first != wanted
