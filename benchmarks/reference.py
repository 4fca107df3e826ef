"""Images a second of stage 1, end to end, side by side with the obvious way to write it.

    python benchmarks/reference.py --out reference.json

DeiT-Tiny at 112 px, 2 + 4 crops, IDMM's colours, CutMix and label smoothing, on JPEG files of 300 x 340 pixels.

    obvious           a Dataset that opens each image with Pillow and makes its views with torchvision, one after the
                      other; a forward pass for each group of crops; dense [B, N] targets; fp32
    idmm fp32, bf16   this project, from its own files to its own optimizer step
    step fp32, bf16   the same on one batch that is there already: the bound that arithmetic sets

Each measurement is a process of its own, so that none has the other's threads or memory; each round measures all rows
one after the other, in an order that turns. What counts is the median over rounds of the ratio to 'obvious'. bf16 is
autocast, and slow where the processor has no instructions for it.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROWS = ("obvious", "idmm fp32", "idmm bf16", "step fp32", "step bf16")
SIZE, SMOOTHING = 112, 0.1


def make_images(root: Path, count: int) -> None:
    """Writes JPEG files."""
    import cv2
    from views_speed import smooth_noise

    root.mkdir(parents=True)
    for n, image in enumerate(smooth_noise(count, 300, 340)):
        cv2.imwrite(str(root / f"{n:05}.jpg"), image)


# ---------------------------------------------------------------------- the obvious way
def obvious(root: Path, batch: int, workers: int) -> Iterator[int]:
    """Trains without end; yields the images of each step."""
    import timm
    import torch
    from PIL import Image
    from views_speed import by_torchvision

    from idmm.config import Views
    from idmm.config.recipes import default_crops

    config = Views(crops=default_crops("idmm"), size=SIZE)
    counts = [group.count for group in config.crops]
    files, groups = sorted(root.iterdir()), list(zip(counts, by_torchvision(config), strict=True))

    class Crops(torch.utils.data.Dataset):
        def __len__(self):
            return len(files)

        def __getitem__(self, i):
            image = Image.open(files[i]).convert("RGB")
            return i, [torch.stack([make(image) for _ in range(n)]) for n, make in groups]

    model = timm.create_model("deit_tiny_patch16_224", img_size=SIZE, num_classes=len(files), drop_path_rate=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-3)
    loader = torch.utils.data.DataLoader(Crops(), batch, shuffle=True, num_workers=workers)
    beta = torch.distributions.Beta(0.5, 0.5)
    for index, views in itertools.chain.from_iterable(itertools.repeat(loader)):
        loss = 0.0
        for crops in views:  # [B, n, 3, S, S]
            images, truth = crops.flatten(0, 1), index.repeat_interleave(crops.shape[1])
            target = torch.full((len(truth), len(files)), SMOOTHING / (len(files) - 1))
            target.scatter_(1, truth[:, None], 1 - SMOOTHING)
            other, side = torch.randperm(len(truth)), int(SIZE * (1 - beta.sample().clamp(0.5, 1)).sqrt())
            top, left = torch.randint(SIZE - side + 1, (2,)).tolist()
            images[:, :, top : top + side, left : left + side] = images[other, :, top : top + side, left : left + side]
            share = 1 - side**2 / SIZE**2
            logits = model(images)
            loss = loss + torch.nn.functional.cross_entropy(logits, share * target + (1 - share) * target[other])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield len(index)


# ---------------------------------------------------------------------- this project
def ours(root: Path, batch: int, precision: str, alone: bool) -> Iterator[int]:
    """Trains by configs/pretrain/idmm.yaml without end; yields the images of each step. ``alone``: on one batch."""
    from idmm.config import PretrainConfig
    from idmm.config.parsing import parse
    from idmm.engine import Loop
    from idmm.stages.assemble import load_splits, resolve, session

    with tempfile.TemporaryDirectory() as out:
        flags = {"data.root": root, "out": f"{out}/run", "train.batch_size": batch, "train.precision": precision}
        argv = itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in flags.items())
        config = parse(PretrainConfig, ["--config", "idmm", "--train.device", "cpu", *argv], "reference")
        parts, notes = resolve(config)
        (phase,) = parts.phases
        with session(parts, notes) as run:
            train = load_splits(parts, run.folder).train
            method, plan = parts.method(phase, parts.backbone(phase), len(train), None), parts.plan(phase, train, [])
            if alone:
                made, run.workers = plan.transform(0, plan.batches.step_images(0, 0)), 0
                plan.transform = lambda epoch, indices: {**made, "index": made["index"][: len(indices)]}
            with contextlib.closing(Loop(run, method, plan).trial()) as steps:
                yield from (count for _, count in steps)


def measure(row: str, root: Path, given) -> float:
    """Returns the images a second of a row, over ``given.seconds`` after the first steps."""
    kind, _, precision = row.partition(" ")
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    steps = (
        obvious(root, given.batch, workers) if kind == "obvious" else ours(root, given.batch, precision, kind == "step")
    )
    for _ in range(2 * workers + 1):  # what workers made while the first step warmed up
        next(steps)
    began, images = time.monotonic(), 0
    while time.monotonic() - began < given.seconds:
        images += next(steps)
    return images / (time.monotonic() - began)


def main() -> None:
    """Prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="images a step")
    parser.add_argument("--images", type=int, default=512, help="images in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--measure", choices=ROWS, help="one row alone, on --root")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    given = parser.parse_args()
    if given.measure:
        print(measure(given.measure, given.root, given), flush=True)
        os._exit(0)  # loader workers and generators need not be waited for
    rates: dict[str, list[float]] = {row: [] for row in given.rows}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "images"
        make_images(root, given.images)
        environment = {**os.environ, "IDMM_CACHE": f"{folder}/cache"}
        command = [
            sys.executable,
            __file__,
            "--root",
            root,
            "--batch",
            str(given.batch),
            "--seconds",
            str(given.seconds),
        ]
        for number in range(given.rounds):
            turn = number % len(given.rows)
            for row in given.rows[turn:] + given.rows[:turn]:
                ran = subprocess.run([*command, "--measure", row], capture_output=True, text=True, env=environment)
                if ran.returncode:
                    sys.exit(f"{row}:\n{ran.stderr}")
                rates[row].append(float(ran.stdout))
                print(f"round {number + 1}: {row:<10} {rates[row][-1]:7.2f} images/s", file=sys.stderr, flush=True)
    import timm
    import torch

    where = f"{len(os.sched_getaffinity(0))} cores of a {platform.machine()} CPU, torch {torch.__version__}, "
    where += f"timm {timm.__version__}"
    print(f"batch {given.batch}, {given.rounds} rounds of {given.seconds:g} s, {where}\n")
    print("| | images/s | ratio to the obvious way |\n|---|---|---|")
    ratios = {}
    for row, found in rates.items():
        each = [a / b for a, b in zip(found, rates.get("obvious", found), strict=True)]
        ratios[row] = statistics.median(each)
        print(f"| {row} | {statistics.median(found):.1f} | {ratios[row]:.2f} ({min(each):.2f} to {max(each):.2f}) |")
    if given.out:
        found = {"where": where, "batch": given.batch, "seconds": given.seconds, "rates": rates, "ratios": ratios}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
