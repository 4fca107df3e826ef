"""The demo: does pretraining on unlabelled images pay? Digits, 10 labels a class, against training from scratch."""

import dataclasses
import json
import statistics
import time
from pathlib import Path

from idmm import options
from idmm.config import FinetuneConfig, PretrainConfig
from idmm.errors import RunError, UserError
from idmm.files import write_text

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "demo"  # of the repository, not of the package
PICTURES = ("loss.png", "crops.png", "comparison.png")
LEAST_GAIN = 5.0  # points


def demo(out: str = "runs/demo", seeds: int = 3, pretrain: str | None = None, finetune: str | None = None) -> dict:
    """Pretrains on a dataset without its labels, then fine-tunes on a few labels from that and from scratch.

    Both fine-tunings are the same but for the weights that they start from. The seed drives everything: pretraining,
    fine-tuning and which images are labelled. The runs lie in OUT/pretrain-SEED, OUT/idmm-SEED and OUT/scratch-SEED;
    a demo that was stopped goes on, one that is finished prints its result again.

    Args:
        out: Folder for the runs, ``demo.json`` and the pictures.
        seeds: How many, from 0.
        pretrain: YAML file of pretraining's keys; None: configs/demo/pretrain.yaml of the repository.
        finetune: YAML file of fine-tuning's keys; None: configs/demo/finetune.yaml.

    Returns:
        What ``demo.json`` holds: ``idmm_top1`` and ``scratch_top1`` (percent of the test images, one a seed), ``gain``
        (of the means, in points), ``seconds`` over all calls, image counts and both configs.

    Raises:
        UserError: A mistake in the configs.
        RunError: The mean gain is below 5 points, or a run could not go on.
    """
    started = time.monotonic()
    stage1, stage2 = _configs(pretrain, finetune)
    settings = json.loads(json.dumps({"seeds": seeds, "pretrain": _plain(stage1), "finetune": _plain(stage2)}))
    result = _finished(Path(out), settings)
    if result is None:
        runs = [_seed(Path(out), seed, stage1, stage2) for seed in range(seeds)]
        result = _summary(runs, settings)
        _pictures(Path(out), result, stage1)
        earlier = sum(run.earlier for run in runs)
        result["seconds"] = round(earlier + time.monotonic() - started, 1)
        write_text(Path(out) / "demo.json", json.dumps(result, indent=2) + "\n")
    _say(Path(out), result)
    if result["gain"] < LEAST_GAIN:
        raise RunError(f"demo: IDMM is {result['gain']:+.1f} points from scratch, wanted at least +{LEAST_GAIN:g}")
    return result


def _configs(pretrain: str | None, finetune: str | None) -> tuple[PretrainConfig, FinetuneConfig]:
    built, faults = [], []
    for flag, kind, given in (("pretrain", PretrainConfig, pretrain), ("finetune", FinetuneConfig, finetune)):
        file = CONFIGS / f"{flag}.yaml" if given is None else Path(given)
        if not file.is_file():
            hint = "; a checkout of the repository has it, or name your own" if given is None else ""
            faults.append(f"{flag}: '{file}' is not there; wanted a YAML file of {flag}'s keys{hint}")
            continue
        try:
            built.append(options.build(kind, file))
        except UserError as error:
            faults += [f"{flag}: {line}" for line in error.faults]
    if faults:
        raise UserError(*faults)
    return built[0], _same_model(*built)


def _same_model(stage1: PretrainConfig, stage2: FinetuneConfig) -> FinetuneConfig:
    """Fine-tuning's config with the pretrained model named in it, for training it from scratch."""
    faults = []
    for name in ("name", "kwargs"):
        tuned, pretrained = getattr(stage2.model, name), getattr(stage1.model, name)
        if tuned and tuned != pretrained:
            faults.append(f"finetune: model.{name} is {tuned!r}, pretraining's is {pretrained!r}; leave it out")
    if faults:
        raise UserError(*faults)
    model = dataclasses.replace(stage2.model, name=stage1.model.name, kwargs=stage1.model.kwargs)
    return dataclasses.replace(stage2, model=model)


def _plain(config) -> dict:
    """A config without what the demo sets itself."""
    return {key: value for key, value in options.plain(config).items() if key not in ("out", "seed", "init", "resume")}


def _finished(out: Path, settings: dict) -> dict | None:
    """The result of an earlier call with the same settings, if all that it made is still there."""
    try:
        result = json.loads((out / "demo.json").read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(result, dict) and all((out / name).exists() for name in PICTURES)
    return result if whole and result.get("settings") == settings else None


@dataclasses.dataclass
class _Runs:
    """The three runs of a seed.

    Attributes:
        results: What each one's result.json holds.
        earlier: Time that was spent on them before this call (seconds).
    """

    results: dict[str, dict]
    earlier: float = 0.0


def _seed(out: Path, seed: int, stage1: PretrainConfig, stage2: FinetuneConfig) -> _Runs:
    """Makes the runs of a seed, or goes on with them, or finds them finished."""
    from idmm.data.loaders import one_thread  # torch is imported when there is something to train
    from idmm.stages.finetune import finetune
    from idmm.stages.pretrain import pretrain

    subset = stage2.data.subset and dataclasses.replace(stage2.data.subset, seed=seed)
    data = dataclasses.replace(stage2.data, subset=subset)
    stage2 = dataclasses.replace(stage2, data=data)
    runs = _Runs({})
    for name, stage, config in (
        ("pretrain", pretrain, stage1),
        ("idmm", finetune, dataclasses.replace(stage2, init=str(_folder(out, "pretrain", seed)))),
        ("scratch", finetune, dataclasses.replace(stage2, init=None)),
    ):
        began = time.monotonic()
        folder = _folder(out, name, seed)
        with one_thread():  # steps this small gain nothing from more, and lose much where other work shares the cores
            runs.results[name] = stage(dataclasses.replace(config, out=str(folder), seed=seed, resume="auto"))
        runs.earlier += max(0.0, runs.results[name]["seconds"] - (time.monotonic() - began))
    return runs


def _folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-{seed}"


def _summary(runs: list[_Runs], settings: dict) -> dict:
    scores = {name: [run.results[name]["top1"] for run in runs] for name in ("idmm", "scratch")}
    first = runs[0].results
    return {
        "idmm_top1": scores["idmm"],
        "scratch_top1": scores["scratch"],
        "gain": statistics.mean(scores["idmm"]) - statistics.mean(scores["scratch"]),
        "seconds": 0.0,
        "unlabelled_images": first["pretrain"]["train_size"],
        "labelled_images": first["idmm"]["train_size"],
        "test_images": first["idmm"]["test_size"],
        "num_classes": first["idmm"]["num_classes"],
        "settings": settings,
    }


def _pictures(out: Path, result: dict, stage1: PretrainConfig) -> None:
    """Draws the losses, the crops of seed 0 and the comparison."""
    from idmm.analysis.crops import crop_sheet
    from idmm.data.cache import load_split
    from idmm.data.datasets import open_splits
    from idmm.data.views import short_side_bound
    from idmm.recipes import settle_method
    from idmm.report import pictures
    from idmm.stages.common import describe_backbone

    def curves(name: str) -> list[list[dict]]:
        files = [_folder(out, name, seed) / "metrics.jsonl" for seed in range(result["settings"]["seeds"])]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    labelled, unlabelled = result["labelled_images"], result["unlabelled_images"]
    tuned = {"from scratch": curves("scratch"), "from IDMM": curves("idmm")}
    panels = {
        f"pretraining: {unlabelled:,} images, no labels": {"IDMM": curves("pretrain")},
        f"fine-tuning: {labelled:,} labelled images": tuned,
    }
    pictures.loss_panels(panels, out / "loss.png")

    stage1, _ = settle_method(stage1)
    smallest = min(group.scale[0] for group in stage1.views.crops)
    split = open_splits(stage1.data, labelled=False).train
    store = load_split(split, bound=short_side_bound(stage1.views.size, smallest), data=stage1.data)
    known = describe_backbone(stage1)
    alpha = stage1.method.cutmix_alpha
    crop_sheet(store, stage1.views, out / "crops.png", mean=known.mean, std=known.std, cutmix_alpha=alpha)

    scores = {"from scratch": result["scratch_top1"], "from IDMM": result["idmm_top1"]}
    title = f"{labelled:,} labelled images"
    pictures.comparison(scores, out / "comparison.png", title, chance=100 / result["num_classes"])


def _say(out: Path, result: dict) -> None:
    seeds = result["settings"]["seeds"]
    print(
        f"{result['unlabelled_images']} images without labels, {result['labelled_images']} with; "
        f"top-1 on {result['test_images']} test images, {seeds} seed{'' if seeds == 1 else 's'}:"
    )
    for label, name in (("from scratch", "scratch_top1"), ("from IDMM", "idmm_top1")):
        values = result[name]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"  {label:<13} {statistics.mean(values):5.1f}{spread} %   ({each})")
    print(f"  gain          {result['gain']:+5.1f} points, in {result['seconds']:.0f} s")
    print(f"{out / 'demo.json'} and {', '.join(PICTURES)} beside it")
