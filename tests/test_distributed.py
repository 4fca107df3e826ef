"""Two processes do what one does: the same images in each step, the same losses, the same weights."""

import json
import re
import signal
from contextlib import closing

import numpy as np
import pytest
from folders import tree
from frozen import NAME, a_run
from helpers import Process, Together, distance, flags, inside, metrics, same, state, state_file, weights

from idmm.data.loaders import BatchPlan
from idmm.files import Lock, read_csv
from idmm.models import create_backbone
from idmm.seeding import seeded
from idmm.stages import read_outputs
from idmm.training import environment

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# A key's bias changes nothing: its gradient is rounding noise, which Adam scales to full steps. So models have none.
PLAIN = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "qkv_bias": False}
ALONE = dict(model__drop_path=0.0, model__kwargs=PLAIN)  # nothing may be drawn a process
PRETRAIN = dict(  # 41 images in batches of 20: the last step has one image, for two processes with three micro-batches
    **ALONE, data__subset={"total": 41}, train__accumulate=3, train__epochs=6, train__save_minutes=60,
    method__cutmix_alpha=0,
)  # fmt: skip
SIDES = [{"size": 16}, {"size": 32, "batch_size": 8}]


def together(stage, out, **changes):
    """Starts a stage on two processes."""
    return Together([stage, *flags(stage, out, **changes)], f"{out}.err")


def torchrun(stage, out, **changes):
    """Starts a stage on two processes, with torchrun."""
    return Process([*TORCHRUN, f"{stage}.py", *flags(stage, out, **changes)], f"{out}.err")


def both(stage, folder, launch=together, **changes):
    """Runs a stage on one process and on two; returns the folders and what the two said."""
    one, two = folder / "one", folder / "two"
    assert inside(stage, one, **changes) == 0
    with launch(stage, two, **changes) as processes:
        assert processes.wait() == 0, processes.said()
        return one, two, processes.said()


def assert_equal(one, two):
    """Same losses, accuracies and weights, to float tolerance."""
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            tolerance = 1e-9 if name.startswith("top") else 1e-5
            rounded = 1.1e-4 if name == "feature_rank" else 1e-12  # to four digits, in the record
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=rounded), (name, a, b)
    assert distance(one, two) < 3e-4  # a tenth of a step at full rate, which Adam may make of noise
    one, two = weights(one), weights(two)
    for name in one:
        assert float((one[name] - two[name]).norm()) < 1e-4 * max(1.0, float(one[name].norm())), name


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize(("count", "batch_size", "accumulate"), [(41, 20, 3), (40, 20, 1), (7, 16, 3), (5, 1, 1)])
def test_same_images_in_each_step(count, batch_size, world, accumulate):
    """Over processes and micro-batches, a step's images are the single process's; their factors make up the mean."""
    single = BatchPlan(count, batch_size, epochs=2, seed=3)
    plans = [BatchPlan(count, batch_size, 2, 3, rank, world, accumulate) for rank in range(world)]
    for epoch in range(2):
        seen = []
        for step in range(single.steps_per_epoch):
            wanted = single.step_images(epoch, step)
            parts = [part for plan in plans for part in plan.micro_batches(plan.step_images(epoch, step))]
            assert len(parts) == world * accumulate, "each process has each micro-batch"
            assert all(len(images) for images, _ in parts), "a process without an image has one at factor 0"
            used = np.concatenate([images for images, factor in parts if factor])
            assert sorted(used) == sorted(wanted) and len(wanted) == single.step_size(step)
            shares = {i: factor / len(images) / world for images, factor in parts if factor for i in images}
            assert all(share == pytest.approx(1 / len(wanted)) for share in shares.values())
            seen.extend(wanted)
        assert sorted(seen) == list(range(count)), "each image once an epoch"
    orders = [np.concatenate([single.step_images(e, s) for s in range(single.steps_per_epoch)]) for e in range(2)]
    assert not np.array_equal(*orders)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return both("pretrain", tmp_path_factory.mktemp("pretrained"), torchrun, **PRETRAIN)


def test_pretrain_on_two_processes(pretrained):
    one, two, said = pretrained
    assert_equal(one, two)
    assert said.count("images: 41 train of digits") == 1, "the first process speaks for both"
    assert "training on cpu:0, 2 processes, fp32" in said or "training on cpu, 2 processes, fp32" in said
    assert (two / "log.txt").read_text().count("training on") == 1
    rows = [read_outputs.instances(out) for out in (one, two)]
    assert rows[0].images == rows[1].images and np.abs(rows[0].weight - rows[1].weight).max() < 3e-4
    assert [environment.read(out)["processes"] for out in (one, two)] == [1, 2]


def test_finetune_on_two_processes(tmp_path):
    """23 images in batches of 20, then of 8; 7 test images, so that the processes have 4 and 3; one epoch a stage."""
    root = tree(tmp_path / "images", train={"a": 12, "b": 11}, val={"a": 3, "b": 4})
    with seeded(0):
        init = a_run(tmp_path / "init", model=create_backbone(NAME, 16, **PLAIN), kwargs={**PLAIN, "img_size": 16})
    one, two, _ = both(
        "finetune", tmp_path, **ALONE, data__name="folder", data__root=str(root), data__subset=None, stages=SIDES,
        init=str(init), train__epochs=1, train__save_minutes=60, augment__mixup_alpha=0, augment__cutmix_alpha=0,
    )  # fmt: skip
    assert_equal(one, two)
    assert len(metrics(two)) == 2
    results = [json.loads((out / "result.json").read_text()) for out in (one, two)]
    assert [{**result, "seconds": 0} for result in results] == [{**results[0], "seconds": 0}] * 2
    assert results[0]["start_top1"] > 0, "the classifier starts from features"
    assert (one / "per_class.csv").read_text() == (two / "per_class.csv").read_text()
    files = [read_csv(out / "predictions.csv") for out in (one, two)]
    np.testing.assert_allclose(*([float(row["probability"]) for row in rows] for rows in files), rtol=1e-3)
    assert [(row["path"], row["class"]) for row in files[0]] == [(row["path"], row["class"]) for row in files[1]]


def test_stopped_and_taken_up_on_two_processes(pretrained, tmp_path):
    """SIGTERM to torchrun: one state is saved, two processes go on from it, and nothing shows in the result."""
    out, (_, whole, _) = tmp_path / "run", pretrained
    with torchrun("pretrain", out, **PRETRAIN) as processes:
        records = out / "metrics.jsonl"
        assert processes.until(lambda: records.exists() and records.stat().st_size), processes.said()
        processes.popen.send_signal(signal.SIGTERM)
        assert processes.wait() != 0
        said = processes.said()
    saved = state(out)
    assert re.search(rf"^interrupted\. .* from epoch {saved['epoch'] + 1}, step {saved['step']}$", said, re.MULTILINE)
    assert said.count("interrupted") == 1 and not (out / "result.json").exists()
    with together("pretrain", out, **PRETRAIN) as processes:
        assert processes.wait() == 0, processes.said()
        assert f"resumes from epoch {saved['epoch'] + 1}, step {saved['step']}" in processes.said()
    assert same(out, whole)
    for a, b in zip(metrics(out), metrics(whole), strict=True):
        assert (a["epoch"], a["loss"]) == (b["epoch"], pytest.approx(b["loss"], rel=1e-6))


def test_diverged_run_says_so_once(tmp_path):
    out = tmp_path / "run"
    with together("pretrain", out, **{**PRETRAIN, "train__lr": 1e20, "train__warmup_epochs": 0}) as processes:
        assert processes.wait() != 0
        said = processes.said()
    assert said.count("the loss is not finite at step 2 (epoch 1, lr ") == 1, said
    assert "RunError" not in said and not state_file(out).exists()


def test_run_in_use_is_left_alone(tmp_path):
    """Only the first process looks at the lock; the other hears of it, and one of them says so."""
    out = tmp_path / "run"
    with closing(Lock(out / "last" / "run.lock")) as lock:
        assert lock.acquire()
        with together("pretrain", out, **PRETRAIN) as processes:
            assert processes.wait() != 0
            said = processes.said()
    assert said.count(f"out: '{out}' is in use by another run. Wait for it or name another folder") == 1
    assert "UserError" not in said and not (out / "config.yaml").exists()
