"""What fine-tuning reports beside its accuracy, the weights that it keeps, and classes of unequal
size."""

import os

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import transfers
from folders import TINY, opened, result, tree
from helpers import column, flags, inside, inside_ok, logged, metrics, read, refused, same, state
from PIL import Image
from pytest import approx
from sklearn.utils.class_weight import compute_class_weight
from test_resume import stop_at
from tiny import assert_same_loss, backbone

from idmm import config
from idmm.data.images import CentreCrop
from idmm.data.listing import list_images
from idmm.evaluation.evaluate import Predictions
from idmm.evaluation.mistakes import write_mistakes
from idmm.evaluation.predictor import load_classifier
from idmm.files import read_csv
from idmm.methods.finetune import Finetune, balanced_weights
from idmm.report.stats import wilson_interval
from idmm.runs import outputs
from idmm.seeding import numpy_rng
from idmm.training import loop

EPOCHS = 6  # of the second stage
BEST = dict(
    data__val_fraction=0.2,
    train__keep="best",
    stages=[
        {"size": 16, "epochs": 1},
        {"size": 24, "epochs": EPOCHS},
    ],
    train__lr=0.03,
    train__warmup_epochs=0,
)
UNEQUAL = dict(
    data__name="folder",
    data__subset=None,
    stages=None,
    train__size=16,
    train__epochs=12,
    train__batch_size=24,
)


def outcome(out):
    """result.json without the seconds."""
    results = result(out)
    del results["seconds"]
    return results


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """A run that keeps its best weights, and the averaged weights after each epoch of its second
    stage."""
    out = tmp_path_factory.mktemp("best") / "run"
    after = []
    end = loop.Loop._end_epoch

    def watched(loop, epoch):
        end(loop, epoch)
        if loop.plan.phase.number == 2:
            after.append(
                {name: tensor.clone() for name, tensor in loop.exported.state_dict().items()}
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_end_epoch", watched)
        inside_ok("finetune", out, **BEST)
    return out, after


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """A run on 22 images of one class and 2 of another, its name in other letters; 4 test
    images."""
    folder = tmp_path_factory.mktemp("unequal")
    root = tree(folder / "images", train={"dog, big": 22, "кот": 2}, test={"dog, big": 3, "кот": 1})
    inside_ok("finetune", folder / "run", **UNEQUAL, data__root=str(root))
    return root, folder / "run"


def test_parameters_with_and_without_classifier(unequal):
    _, out = unequal
    results = result(out)
    for key, name in {"params": "model", "backbone_params": "backbone"}.items():
        weights = safetensors.torch.load_file(out / f"{name}.safetensors")
        assert results[key] == sum(tensor.numel() for tensor in weights.values()), (
            "this network has no buffers"
        )
    assert results["params"] > results["backbone_params"]


def test_the_result_has_what_its_accuracy_is_read_beside(unequal):
    _, out = unequal
    results = result(out)
    rows = read_csv(out / "per_class.csv")
    assert column(rows, "class") == ["dog, big", "кот"]
    assert column(rows, "images") == ["3", "1"]
    hits = [int(row["correct"]) for row in rows]
    assert results["top1"] == approx(25 * sum(hits))
    assert results["mean_per_class"] == approx(100 * (hits[0] / 3 + hits[1]) / 2)
    assert results["top1_interval"] == approx(wilson_interval(sum(hits), 4))
    assert results["largest_class"] == 75
    assert 0 <= results["baseline_top1"] <= 100
    assert "kept_epoch" not in results
    for row, right, images, other in zip(rows, hits, (3, 1), ("кот", "dog, big"), strict=True):
        wrong = images - right
        assert float(row["accuracy"]) == approx(100 * right / images, abs=0.01)
        assert (row["most_confused_with"], row["times"]) == (
            (other, str(wrong)) if wrong else ("", "")
        )
    text = logged(out)
    low, high = results["top1_interval"]
    assert (
        f"top-1's 95 % interval {low:.2f} to {high:.2f}, mean over classes "
        f"{results['mean_per_class']:.2f}, " in text
    )
    assert f"largest class 75.00, the baseline {results['baseline_top1']:.2f} by 24 images" in text
    assert "than always predicting the largest class (75.0 %)" in text
    with Image.open(out / "confusion.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 200


def test_mistakes_are_listed_and_drawn(unequal):
    """All wrong answers of predictions.csv, the most confident first, with a row of thumbnails per
    pair of classes."""
    _, out = unequal
    answers = []
    for row in read_csv(out / "predictions.csv"):
        if row["class"] != row["predicted"]:
            answers.append(row)
    answers.sort(key=lambda row: -float(row["probability"]))
    columns = ("path", "class", "predicted", "probability")
    mistakes = [tuple(row.values()) for row in read_csv(out / "mistakes.csv")]
    assert mistakes == [tuple(row[name] for name in columns) for row in answers]
    assert mistakes
    assert [*read_csv(out / "mistakes.csv")[0]] == ["path", "class", "answer", "confidence"]
    with Image.open(out / "mistakes.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 200


def test_without_mistakes_nothing_is_drawn(unequal, tmp_path):
    root, _ = unequal
    store = opened(root, part="test", labelled=True)
    right = Predictions(store.labels, store.labels[:, None], np.ones(len(store), np.float32))
    write_mistakes(tmp_path, right, store, store.classes)
    assert (tmp_path / "mistakes.csv").read_text() == "path,class,answer,confidence\n"
    assert os.listdir(tmp_path) == ["mistakes.csv"]


def test_the_split_is_a_list_that_labels_read(tmp_path):
    """A run with split.csv, one label corrected in it, is tested on the same images as the run that
    wrote it."""
    root = tree(tmp_path / "d", train={"cat": 10, "dog": 10})
    options = dict(UNEQUAL, train__epochs=1, data__root=str(root))
    inside_ok("finetune", tmp_path / "a", **options, data__val_fraction=0.3)
    rows = read_csv(tmp_path / "a/split.csv")
    assert column(rows, "split").count("test") == 6
    assert len(rows) == 20
    text = (tmp_path / "a/split.csv").read_text()
    name = next(row["path"] for row in rows if row["split"] == "test" and row["class"] == "cat")
    (tmp_path / "corrected.csv").write_text(text.replace(f"{name},cat", f"{name},dog"))
    inside_ok("finetune", tmp_path / "b", **options, data__labels=str(tmp_path / "corrected.csv"))
    tested = [
        {row["path"]: row["class"] for row in read_csv(tmp_path / of / "predictions.csv")}
        for of in "ab"
    ]
    assert tested[0].keys() == tested[1].keys()
    assert [name] == [n for n in tested[0] if tested[0][n] != tested[1][n]]
    assert (tmp_path / "b/split.csv").read_text() == (tmp_path / "corrected.csv").read_text()


def test_classes_of_unequal_size_can_weigh_the_same(unequal, tmp_path):
    root, plain = unequal
    weighed = dict(
        UNEQUAL,
        data__root=str(root),
        train__epochs=1,
        train__class_weights="balanced",
    )
    inside_ok("finetune", tmp_path / "run", **weighed)
    losses = [metrics(out)[0]["loss"] for out in (plain, tmp_path / "run")]
    assert losses[0] != approx(losses[1], rel=1e-3)


def test_what_is_undefined_is_not_zero(tmp_path):
    """The accuracy of a class without test images, and kNN without labels on one of the sides."""
    root = tree(
        tmp_path / "d",
        train={
            "a": 6,
            "b": 6,
            "c": 6,
        },
        test={"a": 3, "b": 3},
    )
    rows = [
        f"{path.relative_to(root)},{path.parent.name},{path.parts[-3]}"
        for path in sorted(root.rglob("*.png"))
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["path,class,split", *rows]))
    run = dict(
        UNEQUAL, data__root=str(root), data__labels=str(tmp_path / "labels.csv"), train__epochs=1
    )
    inside_ok("finetune", tmp_path / "run", **run)
    *others, third = read_csv(tmp_path / "run/per_class.csv")
    assert third["class"] == "c"
    assert third["images"] == "0"
    assert third["accuracy"] == ""
    shares = [float(row["accuracy"]) for row in others]
    assert result(tmp_path / "run")["mean_per_class"] == approx(sum(shares) / 2, abs=0.01)
    for name, parts in {
        "no class in test": {"train": {"a": 6, "b": 6}, "test": {"": 4}},
        "no class in train": {"train": {"": 8}, "test": {"a": 3, "b": 3}},
    }.items():
        root = tree(tmp_path / name, **parts)
        inside_ok("pretrain", tmp_path / f"of {name}", **{**TINY, "data__root": str(root)})
        assert not {"knn", "start_knn"} & result(tmp_path / f"of {name}").keys()
        for record in metrics(tmp_path / f"of {name}"):
            assert "knn" not in record


def test_a_run_in_bf16_is_evaluated_as_predict_does(unequal, tmp_path):
    root, _ = unequal
    run = dict(
        UNEQUAL,
        data__root=str(root),
        train__epochs=1,
        train__precision="bf16",
    )
    inside_ok("finetune", tmp_path / "run", **run)
    rows = read_csv(tmp_path / "run/predictions.csv")
    classifier = load_classifier(tmp_path / "run")
    for row, prediction in zip(
        rows, classifier.predict([root / row["path"] for row in rows]), strict=True
    ):
        assert prediction.label == row["predicted"]
        assert prediction.probability == approx(float(row["probability"]), abs=2e-5)


def test_remarks():
    def remarks_of(hits, **more):
        interval = wilson_interval(hits, 60)
        sizes = {"baseline_train_size": 50, "train_size": 99}
        scores = {
            "top1": 100 * hits / 60,
            "top1_interval": interval,
            "largest_class": 50.0,
        }
        return outputs.remarks(scores | sizes | more)

    (remark,) = remarks_of(30)
    assert "(37.7 to 62.3), than always predicting the largest class (50.0 %)" in remark
    assert len(remarks_of(37)) == 1
    assert remarks_of(38) == [], "49.0 and 50.7 are the lower bounds"
    assert (
        "takes seconds (80.0 %, fitted to 50 of 99 training images)"
        in remarks_of(48, baseline_top1=80.0)[0]
    )
    assert remarks_of(48, baseline_top1=79.0) == []


def test_the_best_on_val_is_what_is_exported_and_reported(best):
    out, after = best
    scores = [record["top1"] for record in metrics(out) if record["stage"] == 2]
    kept_epoch = result(out)["kept_epoch"]
    assert len(scores) == EPOCHS
    assert kept_epoch == scores.index(max(scores)) + 1 != EPOCHS
    exported = safetensors.torch.load_file(out / "model.safetensors")
    assert exported.keys() == after[kept_epoch - 1].keys()
    for name, tensor in after[kept_epoch - 1].items():
        assert torch.equal(exported[name], tensor)
    assert any(not torch.equal(exported[name], tensor) for name, tensor in after[-1].items())
    line = (
        f"train.keep: the weights of epoch {kept_epoch} of {EPOCHS}, top-1 {max(scores):.2f} on val"
    )
    assert line in logged(out)
    info = read(out / "model.json")
    model = timm.create_model(info["name"], **info["kwargs"]).eval()
    model.load_state_dict(exported)
    test = list_images(config.Data(val_fraction=0.2), labelled=True).test
    images = torch.stack(
        [torch.from_numpy(CentreCrop(24, 0.875)(i)).permute(2, 0, 1) for i in test.items]
    )
    mean, std = (torch.tensor(info[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        right = model((images / 255 - mean) / std).argmax(1).numpy() == test.labels
    assert result(out)["top1"] == approx(100 * right.mean(), abs=0.3)  # an image of 360


@pytest.mark.parametrize("moment", ["before the best", "after the best", "at the end"])
def test_a_stopped_run_keeps_the_same(moment, best, tmp_path, monkeypatch):
    whole = best[0]
    kept_epoch = result(best[0])["kept_epoch"]
    at = {
        "before the best": (2, 0, 2),
        "after the best": (2, kept_epoch, 1),
        "at the end": (2, EPOCHS, 0),
    }[moment]
    stop_at(monkeypatch, *at)
    assert inside("finetune", tmp_path / "run", **BEST) == 130
    monkeypatch.undo()
    assert (state(tmp_path / "run")["best"] is None) == (moment == "before the best")
    inside_ok("finetune", tmp_path / "run", **BEST)
    assert same(tmp_path / "run", whole)
    assert outcome(tmp_path / "run") == outcome(whole)


def test_best_by_what_is_reported_is_refused(tmp_path, capsys):
    argv = flags("finetune", tmp_path / "run", train__keep="best")  # digits have no val split
    line = "train.keep: best chooses by val, and there is no split but the one that is reported, "
    line += (
        "expected both val and test images (add a folder, or --data.val_fraction 0.2), or "
        "--train.keep last"
    )
    assert refused(capsys, ["finetune", *argv])[-1] == line
    assert not (tmp_path / "run/last/state.pt").exists()
    tuning = {
        **transfers.GRID["finetune"],
        "train": {**transfers.GRID["finetune"]["train"], "keep": "best"},
    }
    grid = transfers.write(tmp_path / "grid.yaml", finetune=tuning)
    expected = [f"targets 'digits': {line}"]  # the same of 'other' is not repeated
    assert refused(capsys, f"transfer --config {grid} --out {tmp_path}/grid") == expected


def test_balanced_weights_are_scikit_learns():
    labels = np.random.default_rng(0).integers(0, 5, 40)
    expected = compute_class_weight("balanced", classes=np.arange(5), y=labels)
    assert balanced_weights(labels, 5).tolist() == approx(expected.tolist())
    expected = [*expected, 0.0]  # a class without an image
    assert balanced_weights(labels, 6).tolist() == approx(expected)
    assert float(balanced_weights(labels, 6)[torch.from_numpy(labels)].mean()) == approx(1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "epoch, alpha",
    [
        (0, 0.5),
        (1, 0.5),
        (0, 0.0),
    ],
    ids=["Mixup", "CutMix", "no mixing"],
)
def test_loss_against_a_naive_loop(epoch, alpha, weighted):
    model = backbone(num_classes=3)
    method = Finetune(
        model, config.Augment(mixup_alpha=alpha, cutmix_alpha=alpha, label_smoothing=0.1)
    ).eval()
    if weighted:
        method.class_weight = balanced_weights(np.array([0, 0, 0, 0, 0, 1, 1, 2]), 3)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "images": torch.randn(5, 3, 16, 16, generator=generator),
        "label": torch.tensor([0, 2, 1, 0, 2]),
    }

    def naive(method, inputs):
        images = inputs["images"]
        label = inputs["label"]
        mix = method._draw(images, epoch, numpy_rng(5, "mixing"))
        assert mix is None if alpha == 0 else (mix.box is None) == (epoch % 2 == 0), (
            "Mixup on even epochs"
        )
        mixed = images.clone()
        loss = 0.0
        for i in range(5) if mix else ():
            other = images[mix.partner[i]]
            if mix.box is None:
                mixed[i] = mix.lam * images[i] + (1 - mix.lam) * other
            else:
                top, bottom, left, right = mix.box
                mixed[i, :, top:bottom, left:right] = other[:, top:bottom, left:right]
        log_p = model(mixed).log_softmax(1)
        for i in range(5):
            shares = (
                [(1.0, label[i])]
                if mix is None
                else [
                    (mix.lam, label[i]),
                    (1 - mix.lam, label[mix.partner[i]]),
                ]
            )
            for share, of in shares:
                target = [0.9 * (k == of) + 0.1 / 3 for k in range(3)]
                weight = 8 / (3 * [5, 2, 1][of]) if weighted else 1.0
                loss = (
                    loss - share * weight * sum(t * log_p[i, k] for k, t in enumerate(target)) / 5
                )
        return loss

    assert_same_loss(
        method,
        inputs,
        naive,
        epoch=epoch,
        rtol=1e-4,
        atol=1e-6,
    )
    assert "class_weight" not in method.state_dict(), "checkpoints of runs without it still fit"
