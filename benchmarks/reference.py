"""Images per second of stage 1, end to end and in parts, against the obvious implementation.

    python benchmarks/reference.py --out reference.json
    python benchmarks/reference.py --device cuda --batch 256 --images 2048 --out reference.json
    python benchmarks/reference.py --processes 2 --rows "idmm fp32" --out scaling.json

DeiT-Tiny at 112 px, 2 + 4 crops, IDMM's colours, CutMix and label smoothing, on JPEG files of 300 x
340 pixels.

    obvious PRECISION   a Dataset that opens each image with Pillow and makes its views with
    torchvision, one after the
                        other, on one worker per core (on a CPU one less). One forward pass per
                        group of crops, dense [B, N] targets. Its workers run on from epoch to
                        epoch, which favours it
    idmm PRECISION      this project, from its own files to its own optimizer step
    workers PRECISION   the same with views by loader workers, also on a GPU
    step PRECISION      the same on one batch that is on the device already: the arithmetic bound
    views device        only the batches that the device makes
    loader N            only this project's batches, sent to the device, by N workers
    loss N              only the N-way layer of N images, forward and backward

'compiled' behind a row compiles model, loss and colours. PRECISION is fp32, bf16 or fp16
(autocast). --flags go to this project's rows. With --processes 2 each row is measured on one
process and on two with the same number of threads each, which share the same batches.

Each measurement is a process of its own, without the other's threads or memory. Each round measures
all rows in rotating order. The table has the median over rounds of the ratio to the first row.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import side_by_side

PRECISIONS = ("fp32", "bf16", "fp16")
SMOOTHING = 0.1
QUICK = [
    "--model",
    "vit_tiny_patch16_224",
    "--kwargs",
    '{"embed_dim": 32, "depth": 2, "num_heads": 2}',
]
QUICK += ["--size", "32", "--batch", "8", "--images", "64", "--rounds", "1", "--seconds", "0.5"]


def default_rows(device: str) -> list[str]:
    """Return the default rows. A line on standard error explains omitted ones."""
    cores = len(os.sched_getaffinity(0))
    precisions = ["fp32", "bf16"] + ["fp16"] * (device == "cuda")
    if device == "cpu" and "bf16" not in _cpu_flags():
        print("without bf16: this processor has no instructions for it", file=sys.stderr)
        precisions.remove("bf16")
    obvious = [name for name in precisions if name != "fp16"]
    rows = [
        f"{kind} {name}"
        for kind, names in (("obvious", obvious), ("idmm", precisions))
        for name in names
    ]
    return [
        *rows,
        *(f"step {name}" for name in precisions),
        *(f"loader {n}" for n in dict.fromkeys((1, cores))),
    ]


def _cpu_flags() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return "bf16"  # unknown


def make_images(root: Path, count: int) -> None:
    """Write JPEG files."""
    import cv2
    from views_speed import smooth_noise

    root.mkdir(parents=True)
    for n, image in enumerate(smooth_noise(count, 300, 340)):
        cv2.imwrite(str(root / f"{n:05}.jpg"), image)


# ---------------------------------------------------------------------- the obvious way
def obvious(args, precision: str, workers: int) -> Iterator[int]:
    """Train without end and yield the images of each step."""
    import torch
    from PIL import Image
    from views_speed import by_torchvision

    from idmm.config import METHODS, Views
    from idmm.models import create_backbone

    device = args.device
    size = args.size
    config = Views(crops=list(METHODS["idmm"].CROPS), size=size)
    counts = [group.count for group in config.crops]
    files = sorted(args.root.iterdir())
    groups = list(zip(counts, by_torchvision(config), strict=True))

    class Crops(torch.utils.data.Dataset):
        def __len__(self):
            return len(files)

        def __getitem__(self, i):
            image = Image.open(files[i]).convert("RGB")
            return i, [torch.stack([make(image) for _ in range(n)]) for n, make in groups]

    model = create_backbone(
        args.model, size, num_classes=len(files), drop_path=0.1, **args.kwargs
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-3)
    epochs = (torch.randperm(len(files)).tolist() for _ in itertools.count())
    order = itertools.chain.from_iterable(epochs)  # its workers run on from epoch to epoch
    loader = torch.utils.data.DataLoader(
        Crops(), args.batch, sampler=order, num_workers=workers, pin_memory=device == "cuda"
    )
    beta = torch.distributions.Beta(0.5, 0.5)
    for index, views in loader:
        index = index.to(device)
        loss = 0.0
        for crops in views:  # [B, n, 3, S, S]
            images = crops.to(device).flatten(0, 1)
            truth = index.repeat_interleave(crops.shape[1])
            target = torch.full(
                (len(truth), len(files)), SMOOTHING / (len(files) - 1), device=device
            )
            target.scatter_(1, truth[:, None], 1 - SMOOTHING)
            other = torch.randperm(len(truth))
            side = int(size * (1 - beta.sample().clamp(0.5, 1)).sqrt())
            top, left = torch.randint(size - side + 1, (2,)).tolist()
            images[:, :, top : top + side, left : left + side] = images[
                other, :, top : top + side, left : left + side
            ]
            share = 1 - side**2 / size**2
            with torch.autocast(
                device, getattr(torch, _DTYPE[precision]), enabled=precision != "fp32"
            ):
                logits = model(images)
            mixed = share * target + (1 - share) * target[other]
            loss = loss + torch.nn.functional.cross_entropy(logits.float(), mixed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield len(index)


_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


# ---------------------------------------------------------------------- this project
@contextlib.contextmanager
def our_loop(args, flags: dict[str, object]):
    """Give the loop of a run of configs/pretrain/idmm.yaml, with further flags."""
    from idmm.config import PretrainConfig
    from idmm.config.parsing import parse
    from idmm.runs.images import list_run_images
    from idmm.runs.pretrain import build_loop, build_method, build_network
    from idmm.runs.resolve import resolve_pretrain

    wanted = {"data.root": args.root, "out": args.into}
    wanted |= {"train.device": args.device, "train.batch_size": args.batch, "views.size": args.size}
    wanted |= {"model.name": args.model, "model.kwargs": json.dumps(args.kwargs), **flags}
    argv = itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in wanted.items())
    config = parse(
        PretrainConfig, ["--config", "idmm", *argv, *shlex.split(args.flags)], "reference"
    )
    run = resolve_pretrain(config)
    with run.opened():
        images = run.store(list_run_images(run.config), run.folder)
        method = build_method(run, images, build_network(run, images))
        loop = build_loop(run, images, method, None)
        loop.start()
        yield loop


def ours(args, kind: str, flags: dict[str, object]) -> Iterator[int]:
    """Train without end and yield the images of each step. ``step``: on one batch. Others: batches
    without training."""
    from idmm.data.device_views import DEVICE, place_views
    from idmm.data.loaders import choose_workers, on_device, training_batches

    with our_loop(args, flags) as loop:
        plan = loop.plan
        device = loop.accelerator.device
        endless = replace(plan.batches, epochs=10**9)
        _, indices, weight = next(endless.requests())
        batch_fn = loop.batch_fn
        workers = loop.workers
        if kind in ("workers", "loader"):
            batch_fn = plan.transform
            workers = choose_workers(loop.run.config.data.workers, plan.transform, indices)
        if kind == "views":
            batch_fn = place_views(plan.transform, device, DEVICE, None)
            if loop.train.compile:
                batch_fn.compile()
        batches = training_batches(batch_fn, endless, workers)
        if kind in ("loader", "views"):
            for batch in batches:
                yield len(on_device(batch, device)["index"])
        if kind == "step":
            batch = {**on_device(plan.transform(0, indices), device), "weight": weight}
            batches = (batch for _ in itertools.count())
        with loop._memory(), contextlib.closing(batches):
            for number in itertools.count():
                epoch, step = divmod(number, endless.steps_per_epoch)
                loop._step(epoch, step, batches)
                yield endless.step_size(step)


def loss(args, instances: int, is_compiled: bool) -> Iterator[int]:
    """Compute the N-way loss and its gradients without end and yield the images of each batch, six
    crops of each."""
    import nway
    import torch

    module = nway.layer(instances, 192, "linear", args.device)
    if is_compiled:
        module.held = torch.compile(module.held)
    groups = nway.views(instances, 192, 6 * args.batch, args.device)
    while True:
        module.zero_grad()
        module(*groups).backward()
        yield args.batch


# ---------------------------------------------------------------------- measurements
def measure(label: str, args) -> float:
    """Return the images per second of a row, over ``args.seconds`` after the first steps."""
    kind, what, *how = label.split()
    cores = len(os.sched_getaffinity(0))
    if kind == "obvious":
        workers = cores if args.device == "cuda" else max(1, cores - 1)
        steps = obvious(args, what, workers)
    elif kind == "loss":
        workers = 1
        steps = loss(args, int(what), bool(how))
    else:
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does
        workers = int(what) if kind == "loader" else min(8, cores)
        flags = {"train.compile": "true" if how else "false"}
        if kind == "loader":
            flags["data.workers"] = what
        elif kind != "views":
            flags["train.precision"] = what
        steps = ours(args, kind, flags)
    began = time.monotonic()
    for number in range(2 * workers + 2):  # batches made while the first step warmed up
        next(steps)
        if _agreed(number and time.monotonic() - began > args.seconds):
            break
    side_by_side.wait(args.device)
    began = time.monotonic()
    images = 0
    while not _agreed(time.monotonic() - began >= args.seconds):
        images += next(steps)
    side_by_side.wait(args.device)
    return images / (time.monotonic() - began)


def _agreed(done: bool) -> bool:
    """Return whether any process is done: all must make the same number of steps."""
    from idmm import distributed

    return distributed.largest(bool(done))[0]


def run(label: str, processes: int, args, folder: Path) -> float:
    """Measure a row in one or several other processes and return its images per second."""
    command = [sys.executable]
    threads = {}
    if args.processes > 1:
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.processes))}
    if processes > 1:
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
    argv = [*sys.argv[1:], "--images", args.images, "--root", folder / "images", "--measure", label]
    argv += ["--into", folder / f"{time.monotonic()}"]
    environment = {**os.environ, "IDMM_CACHE": str(folder / "cache"), **threads}
    ran = subprocess.run(
        [*command, __file__, *map(str, argv)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=args.limit,
    )
    if ran.returncode or not (found := re.findall(r"(?m)^images/s ([\d.]+)$", ran.stdout)):
        raise RuntimeError(f"{label}, exit code {ran.returncode}:\n{ran.stderr[-4000:]}")
    return float(found[0])


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags. Other flags override --quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="a name of timm's or ours")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="of its constructor, as JSON")
    parser.add_argument("--size", type=int, default=112, help="side of the crops (pixels)")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument(
        "--images", type=int, default=512, help="images in all, rounded down to whole batches"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds after which a measurement is stopped"
    )
    parser.add_argument(
        "--rows", nargs="*", help="rows to measure; the others are compared with the first"
    )
    parser.add_argument("--processes", type=int, default=1, help="compare one process with so many")
    parser.add_argument(
        "--flags", default="", help="further flags of this project's rows, as one text"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model for a moment, to see that it runs"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one row, on --root
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # folder of this project's row
    parser.add_argument(
        "--folder", type=Path, help="keep images and cache here, for further commands"
    )
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args([*QUICK, *argv] if "--quick" in argv else argv)
    args.images = max(2, args.images // args.batch) * args.batch
    return args


def table(rates: dict[str, list[float]], processes: int) -> list[str]:
    """Return the lines of the table."""
    first = next(iter(rates))
    lines = [side_by_side.head("", "images/s", "ratio to the first row")]
    if processes > 1:
        lines = [side_by_side.head("", "images/s", "share of as many times one process")]
    for name, found in rates.items():
        alone, _, count = name.rpartition(" on ")
        ratio = side_by_side.ratios(found, rates[f"{alone} on 1"] if alone else rates[first])
        lines.append(
            side_by_side.row(
                name, f"{statistics.median(found):.1f}", ratio / int(count if alone else 1)
            )
        )
    return lines


def main() -> None:
    """Print the table and write the JSON."""
    args = parsed()
    if args.measure:
        rate = measure(args.measure, args)
        if os.environ.get("RANK", "0") == "0":
            print(f"images/s {rate}", flush=True)
        os._exit(0)  # loader workers and generators need not be waited for
    labels = args.rows or (default_rows(args.device) if args.processes == 1 else ["idmm fp32"])
    if args.quick and not args.rows:  # one of each kind
        labels = list({label.split()[0]: label for label in reversed(labels)}.values())[::-1]
    rows = {label: (label, 1) for label in labels}
    if args.processes > 1:
        rows = {f"{label} on {n}": (label, n) for label in labels for n in (1, args.processes)}
    rates: dict[str, list[float]] = {name: [] for name in rows}
    where = side_by_side.where(args.device, packages=("torch", "torchvision", "timm"))
    with tempfile.TemporaryDirectory() as folder:
        folder = args.folder or folder
        if not (Path(folder) / "images").exists():
            make_images(Path(folder) / "images", args.images)
        for number, name in side_by_side.turns(list(rows), args.rounds):
            rates[name].append(run(*rows[name], args, Path(folder)))
            print(
                f"round {number + 1}: {name:<12} {rates[name][-1]:8.2f} images/s",
                file=sys.stderr,
                flush=True,
            )
            # also of a run that is stopped
            side_by_side.write(args.out, where=where, **vars(args), rates=rates)
    what = f"{args.model} at {args.size} px, batch {args.batch} of {args.images} images"
    print(f"{what}, {args.rounds} rounds of {args.seconds:g} s; {where}\n")
    print("\n".join(table(rates, args.processes)))


if __name__ == "__main__":
    main()
