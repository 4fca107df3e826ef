"""Each method against a loop written from its paper, in values and gradients; heads and momentum
encoders."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import run_info
from tiny import SIDE, assert_same_loss, batch, make
from torch import nn

from idmm import config
from idmm.config import METHODS
from idmm.losses import instance_discrimination_loss
from idmm.methods.mixing import draw_cutmix, mix_images
from idmm.models import create_backbone
from idmm.seeding import numpy_rng, seeded

SINGLE = dict(rtol=2e-5, atol=2e-6)  # losses that are computed in single precision
NEARLY = dict(rtol=1e-6, atol=1e-8)  # a temperature that the library keeps in single precision


def crops(data):
    """Crops one after the other, over the groups."""
    return [views[:, i] for views in data["views"] for i in range(views.shape[1])]


def projected(method, images):
    return method.head(method.backbone(images))


def cosine(a, b):
    return (a * b).sum() / (a.norm() * b.norm())


def supcon(method, data, temperature, label):
    """L_out of SupCon, Eq. 2: the sum over positives stands outside the log; the mean over anchors
    that have any. With a class for each image and two crops it is Eq. 1 of SimCLR."""
    all_crops = crops(data)
    z = torch.cat([projected(method, crop) for crop in all_crops])
    y = [int(c) for _ in all_crops for c in label]
    losses = []
    for i in range(len(z)):
        positives = [p for p in range(len(z)) if p != i and y[p] == y[i]]
        below = sum(torch.exp(cosine(z[i], z[a]) / temperature) for a in range(len(z)) if a != i)
        if positives:
            terms = [
                torch.log(torch.exp(cosine(z[i], z[p]) / temperature) / below) for p in positives
            ]
            losses.append(-sum(terms) / len(positives))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("images", [1, 5])
def test_simclr(images):
    method = make("simclr", temperature=0.3).double()
    loss = assert_same_loss(
        method,
        batch(2, images=images),
        lambda m, g: supcon(m, g, 0.3, range(images)),
    )
    assert (loss == 0) == (images == 1), "one image has nobody to be told from"


@pytest.mark.parametrize(("counts", "images", "temperature"), [((1,), 4, 0.1), ((2, 1), 5, 0.4)])
def test_supcon(counts, images, temperature):
    method = make("supcon", temperature=temperature).double()
    assert_same_loss(
        method,
        batch(*counts, images=images),
        lambda m, g: supcon(m, g, temperature, g["label"]),
    )


def moco(method, data, queue, temperature=0.2):
    """Eq. 1 of MoCo: the query of the first crop, the key of the second, negatives from the queue
    alone."""
    one, other = crops(data)
    q = projected(method, one)
    k = method.teacher(other)
    total = 0.0
    for i in range(len(q)):
        right = torch.exp(cosine(q[i], k[i]) / temperature)
        total = total - torch.log(
            right / (right + sum(torch.exp(cosine(q[i], n) / temperature) for n in queue))
        )
    return total / len(q)


def apart(method):
    """Moves the trained modules away from the momentum encoder, which starts as their copy."""
    with torch.no_grad():
        for p in [*method.backbone.parameters(), *method.head.parameters()]:
            p.add_(
                0.05
                * torch.randn(
                    p.shape,
                    generator=torch.Generator().manual_seed(p.numel()),
                )
            )
    return method


def test_mocov2_and_its_queue():
    """Keys enter after the loss was taken, in order, normalised; the oldest leave first; the
    overlap is lost."""
    method = apart(make("mocov2", info=run_info(13), queue=9)).double()
    bank = method.loss.memory_bank
    expected = bank.bank.clone()
    torch.testing.assert_close(
        expected.norm(dim=1),
        torch.ones(9, dtype=torch.float64),
        rtol=1e-6,
        atol=0,
    )
    # three batches of 4 fill nine places, the third has room for one
    for step, at in enumerate([0, 4, 8, 0, 4]):
        data = batch(2, seed=step)
        assert int(bank.bank_ptr) == at
        queue = expected.clone()
        keys = F.normalize(method.teacher(crops(data)[1]), dim=1)
        before = bank.bank.clone(), bank.bank_ptr.clone()
        loss = method(data, 0, 0)["loss"]
        naive = moco(method, data, queue)
        torch.testing.assert_close(loss, naive)
        expected[at : at + 4] = keys[: 9 - at]
        torch.testing.assert_close(bank.bank, expected)
        if step == 3:
            bank.bank.copy_(before[0]), bank.bank_ptr.copy_(before[1])
            assert_same_loss(method, data, lambda method, data: moco(method, data, queue))  # noqa: B023


def ctr(q, k, temperature):
    """Algorithm 1 of MoCo v3."""
    total = 0.0
    for i in range(len(q)):
        below = sum(torch.exp(cosine(q[i], k[j]) / temperature) for j in range(len(k)))
        total = total - torch.log(torch.exp(cosine(q[i], k[i]) / temperature) / below)
    return 2 * temperature * total / len(q)


def normed(layers, rows):
    """Linear layers, ReLU and batch norm, the last without scale and shift, by this crop's mean and
    variance alone."""
    for layer in layers:
        if isinstance(layer, torch.nn.BatchNorm1d):
            rows = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + layer.eps).sqrt()
            rows = rows if layer.weight is None else layer.weight * rows + layer.bias
        else:
            rows = layer(rows)
    return rows


def mocov3(method, data, temperature):
    """Algorithm 1: f and f_m see a crop at a time."""
    teacher, head = method.teacher.copies
    student = [*method.head.layers, *method.predictor.layers]
    q1, q2 = (normed(student, method.backbone(x)) for x in crops(data))
    k1, k2 = (normed(head.layers, teacher(x)).detach() for x in crops(data))
    return ctr(q1, k2, temperature) + ctr(q2, k1, temperature)


@pytest.mark.parametrize(
    ("backbone", "images", "temperature"),
    [(None, 4, 0.7), ("resnet10t", 5, 0.2)],
)
def test_mocov3(images, backbone, temperature):
    """In values and gradients; a backbone that has batch norms sees a crop at a time, too."""
    if backbone is not None:
        with seeded(0):
            backbone = create_backbone(backbone, 32, num_classes=0)
    data = batch(2, images=images)
    if backbone is not None:
        data["views"] = [views.repeat(1, 1, 1, 2, 2) for views in data["views"]]
    method = apart(make("mocov3", of=backbone, temperature=temperature)).double()
    assert_same_loss(method, data, lambda m, g: mocov3(m, g, temperature))


def dino(method, data, center, sharp, student=0.1, groups=1):
    """Eq. 2 and Algorithm 1 of DINO: the teacher sees the global crops; a crop is not compared with
    itself."""
    all_crops = crops(data)
    first = sum(views.shape[1] for views in data["views"][:groups])
    students = [torch.softmax(projected(method, crop) / student, 1) for crop in all_crops]
    teachers = [
        torch.softmax((method.teacher(crop) - center) / sharp, 1) for crop in all_crops[:first]
    ]
    terms = []
    for t, p in enumerate(teachers):
        for s, q in enumerate(students):
            if s != t:
                terms += [-(p[b] * torch.log(q[b])).sum() for b in range(len(p))]
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("counts", "groups"), [((3, 1), 1), ((1, 1, 2), 2)])
def test_dino(counts, groups):
    method = apart(make("dino", info=run_info(11, global_groups=groups))).double()
    center = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)
    method.loss.center.copy_(center)
    data = batch(*counts)
    assert_same_loss(
        method,
        data,
        lambda m, g: dino(m, g, center, 0.07, groups=groups),
        epoch=3,
        **NEARLY,
    )
    difference = dino(method, data, 0.0, 0.07) - dino(method, data, center, 0.07)
    assert difference.abs() > 1e-3, "the centre counts"


def test_dino_centre_follows_the_teachers_mean():
    """Eq. 4: c <- m c + (1 - m) mean of the teacher's outputs, over its crops and the batch; after
    the loss."""
    method = make("dino", center_momentum=0.25).double()
    center = torch.full((9,), 0.3, dtype=torch.float64)
    method.loss.center.copy_(center)
    for step in range(2):
        data = batch(2, 1, seed=step)
        out = [method.teacher(crop) for crop in crops(data)[:2]]
        method(data, 0, 0)
        center = 0.25 * center + 0.75 * sum(row for part in out for row in part) / 8
        torch.testing.assert_close(method.loss.center.flatten(), center)


def test_dino_teachers_temperature_rises_over_the_warmup():
    method = make("dino", teacher_temperature=0.08)
    method.warmup = 0
    assert method.temperature(0) == 0.08
    method.warmup = 4
    data = batch(2)
    method = apart(method).double()
    # np.linspace(0.04, 0.08, 4)
    for epoch, sharp in ((0, 0.04), (1.5, 0.06), (3, 0.08), (7, 0.08)):
        method.loss.center.zero_()
        torch.testing.assert_close(
            method(data, 0, epoch)["loss"],
            dino(method, data, 0.0, sharp),
            **NEARLY,
        )


def test_dino_holds_its_last_layer_still_in_the_first_epochs():
    method = make("dino")
    method.head.freeze_last_layer = 2
    for epoch, moves in ((0, False), (1, False), (2, True)):
        method.zero_grad()
        method(batch(2, double=False), 0, epoch)["loss"].backward()
        method.before_step(epoch)
        (last,) = (p for p in method.head.last_layer.parameters() if p.requires_grad)
        assert (last.grad is not None) == moves
        for p in (
            *method.backbone.parameters(),
            *method.head.layers.parameters(),
        ):
            assert p.grad is not None


def test_supervised_with_cutmix():
    """Each group is mixed on its own, with the classes of what was mixed in; the groups' means are
    added."""

    def naive(method, data):
        total = 0.0
        for number, views in enumerate(data["views"]):
            flat = views.reshape(-1, 3, SIDE, SIDE)
            label = torch.tensor([int(y) for y in data["label"] for _ in range(views.shape[1])])
            mix = draw_cutmix(len(flat), SIDE, SIDE, 0.5, numpy_rng(5, "cutmix", number))
            log_p = method.classifier(method.backbone(mix_images(flat, mix))).log_softmax(1)
            for i in range(len(flat)):
                target = torch.zeros(3, dtype=torch.float64)
                for share, y in (
                    (mix.lam, label[i]),
                    (1 - mix.lam, label[mix.partner[i]]),
                ):
                    target += share * (0.9 * F.one_hot(y, 3).double() + 0.1 / 3)
                total = total - (target * log_p[i]).sum() / len(flat)
        return total

    assert_same_loss(make("supervised").double(), batch(2, 3), naive)


def test_idmm_with_a_projection():
    """Row 2 of Table 9: an MLP between the features and the N-way layer, which is as wide as the
    MLP's output."""
    method = make("idmm", projection=True, hidden_dim=10, dim=6, cutmix_alpha=0).double()
    assert method.classifier.weight.shape == (11, 6)

    def naive(method, data):
        first, _, last = method.head.layers
        total = 0.0
        for views in data["views"]:
            hidden = torch.relu(first(method.backbone(views.flatten(0, 1))))
            target = data["index"].repeat_interleave(views.shape[1])
            logits = last(hidden).float()
            total = total + instance_discrimination_loss(logits, method.classifier.weight, target)
        return total

    assert_same_loss(method, batch(2, 1), naive, **SINGLE)
    method = make("idmm", projection=True, dim=6, classifier_init="features")
    features = torch.randn(11, 16, generator=torch.Generator().manual_seed(4))
    method.prepare(features)
    rows = method.head(features)
    torch.testing.assert_close(method.classifier.weight, F.normalize(rows - rows.mean(0), dim=1))
    with torch.no_grad():
        method.classifier.weight[:3] *= -1  # some are told wrongly
    predicted = (rows @ method.classifier.weight.T).argmax(1)
    share = float((predicted == torch.arange(11)).float().mean())
    assert 0 < share < 1
    accuracy = method.diagnose(features, torch.arange(11))
    assert accuracy == {"instance_accuracy": pytest.approx(100 * share)}


def layers(head):
    """Kinds and widths of a head's layers, in short."""
    names = []
    for layer in head.modules():
        weight = getattr(layer, "weight", None)
        shape = "" if weight is None else "-".join(map(str, weight.shape))
        if not list(layer.children()) and not isinstance(layer, nn.Identity):
            names.append(f"{type(layer).__name__}{shape}")
    return " ".join(names)


def test_heads_are_the_papers():
    for name in ("simclr", "supcon", "mocov2"):
        head = make(name).head
        assert layers(head) == "Linear16-16 ReLU Linear256-16"
        assert head.layers[0].bias is not None
    v3 = make("mocov3")
    block = "Linear12-16 BatchNorm1d12 ReLU Linear12-12 BatchNorm1d12 ReLU"
    # the last norms without scale and shift
    assert layers(v3.head) == f"{block} Linear6-12 BatchNorm1d"
    assert layers(v3.predictor) == "Linear12-6 BatchNorm1d12 ReLU Linear6-12 BatchNorm1d"
    assert layers(make("dino").head.layers) == "Linear12-16 GELU Linear12-12 GELU Linear6-12"


CONSTANT = [0.9] * 10
# 0.9 to 1 after ten steps
RISING = [1 - 0.1 * (math.cos(math.pi * step / 10) + 1) / 2 for step in range(10)]


@pytest.mark.parametrize(
    ("name", "momenta"),
    [("mocov2", CONSTANT), ("mocov3", RISING), ("dino", RISING)],
)
def test_the_momentum_encoder_is_an_average_of_what_it_follows(name, momenta):
    method = make(name, info=run_info(11, steps=10), momentum=0.9)
    followed = [*method.backbone.parameters(), *method.head.parameters()]
    copies = list(method.teacher.parameters())
    averages = [p.detach().clone() for p in followed]
    torch.testing.assert_close(copies, averages, rtol=0, atol=0)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.5)
    for step in (0, 1, 5, 9):
        method(batch(2, double=False, seed=step), 0, 0)["loss"].backward()
        optimizer.step()
        method.after_step(step)
        for average, p in zip(averages, followed, strict=True):
            average.lerp_(p.detach(), 1 - momenta[step])
        torch.testing.assert_close(copies, averages)
    assert not all(torch.allclose(a, b) for a, b in zip(copies, followed, strict=True))


def test_mocov3_leaves_the_patch_projection_as_it_was_drawn():
    method = make("mocov3")
    for name, p in method.backbone.named_parameters():
        assert p.requires_grad != ("patch_embed" in name)
    method(batch(2, double=False), 0, 0)["loss"].backward()
    assert all(p.grad is not None for p in method.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", METHODS)
def test_localization_is_added_to_each_method(name):
    data = batch(2, double=False)
    plain = make(name)(data, 7, 0)
    method = make(name, drloc=config.DrLoc(weight=0.3, pairs=4))
    both = method(data, 7, 0)
    assert both.keys() - plain.keys() == {"drloc"}
    assert float(both["drloc"]) > 0
    expected = plain["loss"] + 0.3 * both["drloc"]
    torch.testing.assert_close(both["loss"], expected, rtol=1e-5, atol=1e-5)
    both["loss"].backward()
    assert all(p.grad is not None for p in method.localization.parameters())
