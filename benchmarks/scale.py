"""Memory, arithmetic and communication of IDMM past one machine: the tables of docs/scale.md, and what checks them.

    python benchmarks/scale.py                              # tables from formulas: a minute, nothing measured
    python benchmarks/scale.py --mfu 0.5 --device A100 --layer tf32 --price 2 --gco2 300
    python benchmarks/scale.py --simulate --check --toolkit --plots docs/images --out scale.json   # minutes
    python benchmarks/scale.py --simulate --check --toolkit --quick     # to see that it runs

The formulas are those of scale_model.py, each derived there. ``--simulate`` measures the gradient error of sampled rows
(scale_sampling.py), ``--check`` holds the predictions to measured steps of one and of two processes (scale_checks.py),
``--toolkit`` measures what this toolkit does once for each image (scale_toolkit.py). All of it runs on the CPU.
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import scale_model as model
from scale_model import Assumed, Step

SIZES = [10**n for n in range(4, 10)]
RANKS = (1, 8, 64, 1024)
WHOLE, SHARDED = False, True
HOURS = 3600


def table(title: str, head: Iterable[str], rows: Iterable[Iterable]) -> None:
    """Prints a Markdown table."""
    head = list(head)
    print(f"\n{title}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    sys.stdout.flush()


def short(value: float, digits: int = 3) -> str:
    """A number with few digits: 0.0123, 4.56, 789, 12,300."""
    if value == 0 or not math.isfinite(value):
        return "never" if math.isinf(value) else "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}" if abs(value) >= 1e-4 else f"{value:.1e}"


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{short(count)} {unit}"
        count /= 1000


def millis(seconds: float) -> str:
    return short(1000 * seconds)


# ---------------------------------------------------------------------- tables from formulas
def memory(d: int, ranks: tuple[int, ...] = RANKS) -> None:
    """Memory of a rank."""
    rows = []
    for n in SIZES:
        steps = [Step(n, d, model.batch_of(r), ranks=r) for r in ranks]
        whole = [size(steps[0].states(WHOLE)), size(steps[1].states(WHOLE))]
        sharded = [size(step.states(SHARDED)) for step in steps[1:]]
        rows.append([f"{n:,}", size(n * d * 4), *whole, *sharded, size(steps[0].logits(held=True))])
    head = ["N", "W", "one rank", "whole on each of several", *(f"sharded over {r:,}" for r in ranks[1:])]
    what = f"W, gradient and AdamW's moments, bytes a rank, d = {d}; all logits: of 256 images with six crops"
    table(what, [*head, "all logits, and their gradient"], rows)


def arithmetic(assumed: Assumed, size_: int, names: Iterable[str] = model.BACKBONES) -> None:
    """Where the N-way layer costs as much as the backbone."""
    rows = []
    for name in names:
        net = model.counted(name, size_)
        slower = [
            assumed.mfu * assumed.device.bf16 / (assumed.layer_mfu * getattr(assumed.device, kind))
            for kind in ("bf16", "tf32", "fp32")
        ]
        layer = 6 * 8 * 10**6 * net.width  # logits made twice
        even = [short(model.break_even(net.width, net.flops, times), 2) for times in (1, *slower)]
        rows.append(
            [name, net.width, short(net.flops / 1e9), short(6 * 3 * net.flops / 1e9), short(layer / 1e9), *even]
        )
    head = ["backbone", "d", "GFLOP a crop, forward", "GFLOP an image's step", "N-way at N = 10⁶", "N of equal FLOPs"]
    what = f"{size_} px, six crops; N from which on the N-way layer takes longer than the backbone"
    table(f"{what} ({said(assumed)})", [*head, "equal time, bf16", "tf32", "fp32"], rows)


def said(assumed: Assumed) -> str:
    """The assumptions, for a table's title."""
    rates = f"{assumed.mfu:.0%} of the bf16 peak for the backbone, {assumed.layer_mfu:.0%} of the {assumed.layer} peak"
    return f"{assumed.device.name}, {rates} for the N-way products"


def communication(assumed: Assumed, d: int, network: str) -> None:
    """A step's parts over N and ranks."""
    rate, rows = model.NETWORKS[network], []
    for ranks in RANKS:
        for n in SIZES[1:]:
            step = Step(n, d, model.batch_of(ranks), ranks=ranks)
            whole, sharded = (step.seconds(assumed, rate, way) for way in (WHOLE, SHARDED))
            longest = [
                "does not fit" if step.states(way) > assumed.device.memory else max(parts, key=parts.get)
                for way, parts in ((WHOLE, whole), (SHARDED, sharded))
            ]
            layer = millis(whole["layer"] + whole["softmax"])
            adam = f"{millis(whole['adam'])} / {millis(sharded['adam'])}"
            sent = [
                f"{size(step.sent(way))}, {millis(p['network'])}" for way, p in ((WHOLE, whole), (SHARDED, sharded))
            ]
            rows.append([ranks, f"{step.images:,}", f"{n:,}", millis(whole["backbone"]), layer, adam, *sent, *longest])
    head = ["ranks", "images", "N", "backbone", "N-way layer", "AdamW, whole / sharded", "whole: sent, network"]
    head += ["sharded: sent, network", "longest part, whole", "sharded"]
    table(f"A step, ms a rank; DeiT-Tiny at 112 px, d = {d}, {network} ({said(assumed)})", head, rows)


def bounds(assumed: Assumed, d: int) -> None:
    """From which N on the network bounds whole W."""
    rows = []
    for name, rate in model.NETWORKS.items():
        found = []
        for ranks in (2, *RANKS[1:]):
            step = Step(1, d, model.batch_of(ranks), ranks=ranks)
            found += [
                short(model.network_bound(step, replace(assumed, layer=kind), rate), 2) for kind in ("fp32", "bf16")
            ]
        rows.append([name, *(f"{a} / {b}" for a, b in zip(found[::2], found[1::2], strict=True))])
    head = ["network", *(f"{r:,} ranks" for r in (2, *RANKS[1:]))]
    what = "N from which on the all-reduce of whole W takes longer than the rest of the step, N-way products in fp32"
    table(f"{what} / bf16; 0: the backbone's gradient alone does ({said(assumed)})", head, rows)


def sampled_costs(assumed: Assumed, d: int) -> None:
    """What a step on one rank takes with sampled rows: the layer works on M rows and the batch's own."""
    rows = []
    for n in SIZES[2:]:
        exact = Step(n, d).seconds(assumed, 1.0, WHOLE)
        entries = [millis(exact["layer"] + exact["softmax"]), millis(exact["adam"])]
        for m in (10**3, 10**4, 10**5):
            step = Step(min(n, m + 256), d)
            few = step.seconds(assumed, 1.0, WHOLE)
            host = 2 * 3 * 4 * step.n * d / assumed.device.host
            entries.append(f"{millis(few['layer'] + few['softmax'] + few['adam'])} ({millis(host)})")
        rows.append([f"{n:,}", *entries, size(12 * n * d)])
    head = ["N", "exact layer", "exact AdamW", *(f"M = {m:,}" for m in (10**3, 10**4, 10**5)), "W and moments"]
    what = f"ms a step of 256 images with six crops, d = {d}; in brackets: to fetch the rows and their moments from"
    table(f"{what} the host's memory and bring them back ({said(assumed)})", head, rows)


def adam(d: int, quick: bool) -> None:
    """Adam in rows that are seldom touched."""
    from scale_sampling import adam_moves

    rows, found = [], []
    for every in (1, 10, 100, 1000, 10_000):
        moves = adam_moves(every, 50 if quick else 200)
        found.append({"every": every, **moves})
        rows.append([f"{every:,}", *(f"{moves[k]:.2f} ± {moves[f'{k} spread']:.2f}" for k in ("dense", "lazy"))])
    exactly = (
        adam_moves(100, 20 if quick else 100, by_torch=True)["dense"],
        adam_moves(100, 20 if quick else 100)["dense"],
    )
    table(
        "How far a row goes a touch, in learning rates; gradients of mean 1 and standard deviation 1",
        ["steps between touches", "dense: moments decay at every step", "lazy: rows stand still"],
        rows,
    )
    print(
        f"\ntorch.optim.AdamW through all steps, 100 between touches: {exactly[0]:.2f}; in closed form {exactly[1]:.2f}"
    )
    rows = []
    for n in SIZES[2:]:
        lazy = [size(28 * (m + 256) * d) for m in (10**3, 10**4, 10**5)]
        rows.append([f"{n:,}", size(28 * n * d), *lazy, size(4 * n)])
    head = ["N", "dense", *(f"lazy, M = {m:,}" for m in (10**3, 10**4, 10**5)), "a step number for each row"]
    table(f"Memory traffic of AdamW a step, d = {d}", head, rows)
    return found


def cost(given, assumed: Assumed, flops: float) -> list[str]:
    """Cells of a table: PFLOP, hours, energy, cost."""
    hours = [flops / (given.mfu * device.bf16) / HOURS for device in (model.A100, model.H100)]
    own = flops / (given.mfu * assumed.device.bf16) / HOURS
    kwh = own * assumed.device.watts / 1000 * given.pue
    days = flops / (given.cpu * 6 * 3 * model.counted(model.TINY, 112).flops) / HOURS / 24
    cells = [flops / 1e15, *hours, days, kwh, kwh * given.gco2 / 1000]
    return [*map(short, cells), *([short(own * given.price)] if given.price else [])]


def cost_head(given, assumed: Assumed) -> tuple[list[str], str]:
    """The columns of :func:`cost`, and what is assumed."""
    head = ["PFLOP", "A100 hours", "H100 or H200 hours", "days of 2 CPU cores", "kWh", "kg CO₂"]
    what = f"GPUs at {given.mfu:.0%} of their bf16 peak, CPU cores at {given.cpu:g} images/s of DeiT-Tiny's pretraining"
    energy = f"energy of {assumed.device.name} at {assumed.device.watts:g} W x {given.pue:g}, {given.gco2:g} g CO₂/kWh"
    price = f", {given.price:g} a GPU-hour" if given.price else ""
    return head + (["cost"] if given.price else []), f"{what}, {energy}{price}"


def paper(given, assumed: Assumed) -> list[dict]:
    """The paper's runs: FLOPs, hours, cost. By table, by kind of run, and what one user's images take."""
    runs, (head, what) = model.paper(), cost_head(given, assumed)
    tables: dict[str, list] = {}
    kinds: dict[tuple, list] = {}
    for run in runs:
        for entry in (
            tables.setdefault(run.table, [0, 0.0]),
            tables.setdefault("all", [0, 0.0]),
            kinds.setdefault((run.table, run.what, run.model), [0, 0.0]),
        ):
            entry[0] += run.runs
            entry[1] += run.flops()
    rows = [[key, count, *cost(given, assumed, flops)] for key, (count, flops) in sorted(tables.items())]
    table(f"The paper's tables; {what}", ["table", "runs", *head], rows)
    rows, n = [], model.SETS["flowers"]
    for name in model.BACKBONES:
        first = model.Run("", "", name, n, 800, 112, "idmm", n).flops()
        small = [first, first + model.Run("", "", name, n, 200, 224).flops()]
        long = first + model.Run("", "", name, n, 800, 224).flops() + model.Run("", "", name, n, 100, 448).flops()
        for label, flops in zip(
            ("pretraining", "and 200 epochs at 224 px", "or 800, and 100 at 448 px"), [*small, long], strict=True
        ):
            rows.append([name, label, *cost(given, assumed, flops)])
    table("One recipe on 2,040 images (flowers): 800 epochs of IDMM at 112 px", ["backbone", "what", *head], rows)
    rows = [[*key, count, *cost(given, assumed, flops)] for key, (count, flops) in sorted(kinds.items())]
    table("By kind of run", ["table", "what", "backbone", "runs", *head], rows)
    keys = ("table", "what", "model", "runs", "flops")
    return [dict(zip(keys, (*key, *entry), strict=True)) for key, entry in kinds.items()]


def plain_words(given, assumed: Assumed) -> None:
    """What N images take around the arithmetic."""
    net, rows = model.counted(model.TINY, 112), []
    for n in (10**4, 10**5, 10**6, 10**8):
        cache = [size(n * 3 * h * w) for h, w in ((375, 500), (112, 112))]
        checkpoint = 12 * (n * net.width + net.params)
        loader = n * given.view_ms / 1000 / 16
        gpu = n * 6 * 3 * net.flops / (given.mfu * assumed.device.bf16)
        layer = n / 256 * Step(n, net.width).layer_flops() / (assumed.layer_mfu * assumed.layer_peak)
        saved = f"{size(checkpoint)}, {short(checkpoint / given.disk)} s"
        rows.append([f"{n:,}", *cache, size(4 * n * net.width), saved, *map(short, (loader, gpu, layer))])
    head = ["N", "cache, 500 x 375", "cache, 112 x 112", "features", "checkpoint, time to write"]
    head += ["views on 16 cores, s an epoch", "backbone, s an epoch", "exact N-way layer, s an epoch"]
    what = f"DeiT-Tiny at 112 px; {given.view_ms:g} ms an image for views, {size(given.disk)}/s to the disk"
    table(f"{what} ({said(assumed)}, one GPU)", head, rows)


# ---------------------------------------------------------------------- what is measured
def simulation(given) -> list[dict]:
    """Runs the simulation and prints it, a table a state."""
    from scale_sampling import SAMPLERS, simulate

    n, views, draws = (20_000, 16, 4) if given.quick else (10**6, 64, 12)
    sampled = [10**2, 10**3] if given.quick else [10**2, 10**3, 10**4, 10**5]
    found = simulate(n, given.width, views, sampled, draws, lambda line: print(line, file=sys.stderr, flush=True))
    columns = ("z error", "z bias", "z spread", "z cosine", "own error", "own cosine", "W error", "W cosine")
    for state in dict.fromkeys(entry["state"] for entry in found):
        of = [entry for entry in found if entry["state"] == state]
        rows = [
            [kind, f"{e['M']:,}", *(f"{e[c]:.3f}" for c in columns), f"{e['loss bias']:.2f}"]
            for kind in SAMPLERS
            for e in of
            if e["sampler"] == kind
        ]
        title = f"{state}: the own row has {of[0]['own share']:.2g} of the softmax (median)"
        table(
            f"{title}; N = {n:,}, d = {given.width}, {views} views, {draws} draws",
            ["rows", "M", *columns, "loss"],
            rows,
        )
    return found


def checked(given) -> list[dict]:
    """Holds predictions to measurements and prints them."""
    from scale_checks import checks

    found = checks(given.quick, given.rounds)
    rows = []
    for e in found:
        parts = " + ".join(f"{1000 * e[part]:.0f}" for part in ("products", "softmax", "adam", "network") if part in e)
        times = [parts, f"{1000 * e['predicted']:.0f}", f"{1000 * e['step']:.0f}", f"{e['step'] / e['predicted']:.2f}"]
        space = [size(e["predicted_bytes"]), size(e["peak"]), f"{e['peak'] / e['predicted_bytes']:.2f}"]
        rows.append([e["way"], f"{e['n']:,}", e["d"], e["views"], *times, *space])
    head = ["W", "N", "d", "views", "products + softmax + adam (+ network), ms", "predicted", "measured", "ratio"]
    table(f"Predicted and measured, {where()}", [*head, "memory, predicted", "measured", "ratio"], rows)
    return found


def toolkit(given) -> list[dict]:
    """What the toolkit does once for each image."""
    from scale_toolkit import table as measured

    found = measured(20_000 if given.quick else 10**6)
    rows = [[e["what"], f"{e['seconds']:.2f}", size(e["bytes"]), size(e["file"]) if e["file"] else ""] for e in found]
    head = ["what", "s, one core", "memory", "file"]
    table(f"What is done once for each image, at N = {found[0]['images']:,}, {where()}", head, rows)
    return found


def where() -> str:
    """The machine, in words."""
    import torch

    return f"{len(os.sched_getaffinity(0))} cores of a {platform.machine()} CPU, torch {torch.__version__}"


def parsed() -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="H100", choices=[device.name for device in model.DEVICES])
    parser.add_argument("--mfu", type=float, default=0.2, help="share of the bf16 peak that backbones reach")
    parser.add_argument(
        "--layer", default="fp32", choices=("fp32", "tf32", "bf16"), help="of the N-way layer's products"
    )
    parser.add_argument("--layer_mfu", type=float, default=0.6, help="share of the peak that those reach")
    parser.add_argument("--network", default="InfiniBand 400 Gb/s", choices=model.NETWORKS)
    parser.add_argument("--width", type=int, default=192, help="width of the features, d")
    parser.add_argument("--cpu", type=float, default=21.0, help="images/s of 2 CPU cores (benchmarks/reference.py)")
    parser.add_argument(
        "--view_ms", type=float, default=2.2, help="ms of a core for an image's crops (docs/methods.md)"
    )
    parser.add_argument("--disk", type=float, default=1e9, help="bytes/s that a disk takes")
    parser.add_argument("--price", type=float, help="of a GPU-hour, in any currency; nothing: no costs are shown")
    parser.add_argument("--pue", type=float, default=1.2, help="energy of the building over that of the board")
    parser.add_argument("--gco2", type=float, default=400.0, help="g CO₂ a kWh")
    parser.add_argument("--simulate", action="store_true", help="gradient error of sampled rows, about 5 minutes")
    parser.add_argument("--check", action="store_true", help="predictions against measured steps, about 3 minutes")
    parser.add_argument("--toolkit", action="store_true", help="what is done once for each image, about a minute")
    parser.add_argument("--rounds", type=int, default=5, help="of each measured step")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--plots", type=Path, help="folder for scale_memory.png and, with --simulate, scale_errors.png")
    parser.add_argument("--out", type=Path, help="a JSON file of all that was measured, and of the paper's runs")
    return parser.parse_args()


def main() -> None:
    """Prints all tables and writes what was asked for."""
    given = parsed()
    (device,) = (device for device in model.DEVICES if device.name == given.device)
    assumed = Assumed(device, given.mfu, given.layer, given.layer_mfu)
    memory(given.width)
    memory(768)
    arithmetic(assumed, 112, model.BACKBONES[:1] if given.quick else model.BACKBONES)
    arithmetic(assumed, 224, model.BACKBONES[:1] if given.quick else model.BACKBONES)
    communication(assumed, given.width, given.network)
    bounds(assumed, given.width)
    sampled_costs(assumed, given.width)
    plain_words(given, assumed)
    found = {"where": where(), "given": {key: str(value) for key, value in vars(given).items()}}
    found["adam"] = adam(given.width, given.quick)
    found["paper"] = [] if given.quick else paper(given, assumed)
    for name, work in (("simulate", simulation), ("check", checked), ("toolkit", toolkit)):
        if getattr(given, name):
            found[name] = work(given)
    if given.plots:
        from scale_plots import draw_errors, draw_memory

        draw_memory(given.plots / "scale_memory.png", given.width)
        if given.simulate:
            draw_errors(given.plots / "scale_errors.png", found["simulate"])
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
