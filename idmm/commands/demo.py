"""The demo: does pretraining on unlabelled images pay? Digits, 10 labels a class, against training from scratch."""

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from idmm.config import FinetuneConfig, PretrainConfig, parsing
from idmm.config.commands import DemoConfig
from idmm.errors import RunError, UserError, checked, naming
from idmm.files import json_lines, write_json
from idmm.progress import duration, log
from idmm.stages import STAGES

PICTURES = ("loss.png", "crops.png", "comparison.png")
ROWS = {"raw pixels": "pixel_knn", "from scratch": "scratch_top1", "from IDMM": "idmm_top1"}
RUNS = {"pretrain": "pretraining", "idmm": "fine-tuning from IDMM", "scratch": "fine-tuning from scratch"}
LEAST_GAIN = 5.0  # points


def demo(given: DemoConfig) -> dict:
    """Pretrains on a dataset without its labels, then fine-tunes on a few labels from that and from scratch.

    Both fine-tunings are the same but for the weights that they start from. The seed drives everything: pretraining,
    fine-tuning and which images are labelled. The runs lie in OUT/pretrain-SEED, OUT/idmm-SEED and OUT/scratch-SEED;
    a demo that was stopped goes on, one that is finished prints its result again.

    Returns:
        What ``demo.json`` holds: ``idmm_top1``, ``scratch_top1`` and ``pixel_knn`` (percent of the test images, one a
        seed), ``largest_class`` (its share of them), ``gain`` (of the means, in points), ``seconds`` over all calls,
        image counts and both configs.

    Raises:
        UserError: A mistake in the configs.
        RunError: The mean gain is below 5 points, or a run could not go on.
    """
    started = time.monotonic()
    out, (stage1, stage2) = Path(given.out), _configs(given)
    settings = json.loads(json.dumps({"seeds": given.seeds, "pretrain": _plain(stage1), "finetune": _plain(stage2)}))
    result = _finished(out, settings)
    if result is None:
        runs, earlier = _runs(out, given.seeds, stage1, stage2)
        result = _summary(runs, settings)
        _pictures(out, result, stage1)
        result["seconds"] = round(earlier + time.monotonic() - started, 1)
        write_json(out / "demo.json", result)
    _say(out, result)
    if result["gain"] < LEAST_GAIN:
        raise RunError(f"demo: IDMM is {result['gain']:+.1f} points from scratch, wanted at least +{LEAST_GAIN:g}")
    return result


def _configs(demo: DemoConfig) -> tuple[PretrainConfig, FinetuneConfig]:
    """The stages' configs; the pretrained model is named in fine-tuning's, too, for training it from scratch."""

    def built(stage: str, file: str):
        with naming(stage):
            return STAGES[stage].build(file)

    stage1, stage2 = checked(lambda: built("pretrain", demo.pretrain), lambda: built("finetune", demo.finetune))
    models = [(name, getattr(stage2.model, name), getattr(stage1.model, name)) for name in ("name", "kwargs")]
    if faults := [
        f"finetune: model.{name} is {tuned!r}, pretraining's is {pretrained!r}; leave it out"
        for name, tuned, pretrained in models
        if tuned and tuned != pretrained
    ]:
        raise UserError(*faults)
    model = replace(stage2.model, name=stage1.model.name, kwargs=stage1.model.kwargs)
    return stage1, replace(stage2, model=model)


def _plain(config) -> dict:
    """A config without what the demo sets itself."""
    return {key: value for key, value in parsing.plain(config).items() if key not in ("out", "seed", "init", "resume")}


def _finished(out: Path, settings: dict) -> dict | None:
    """The result of an earlier call with the same settings, if all that it made is still there."""
    try:
        result = json.loads((out / "demo.json").read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(result, dict) and all((out / name).exists() for name in PICTURES)
    return result if whole and result.get("settings") == settings else None


def _runs(out: Path, seeds: int, stage1: PretrainConfig, stage2: FinetuneConfig) -> tuple[dict[str, list], float]:
    """Makes the three runs of each seed, or goes on with them, or finds them finished; returns their results, a list
    over seeds by name, and the time spent on them before this call (seconds)."""
    from idmm.data.loaders import one_thread  # torch is imported when there is something to train

    results, earlier = {name: [] for name in RUNS}, 0.0
    for seed in range(seeds):
        subset = stage2.data.subset and replace(stage2.data.subset, seed=seed)
        tuning = replace(stage2, data=replace(stage2.data, subset=subset))
        configs = {
            "pretrain": stage1,
            "idmm": replace(tuning, init=str(_folder(out, "pretrain", seed))),
            "scratch": replace(tuning, init=None),
        }
        for name, config in configs.items():
            stage = STAGES["pretrain" if name == "pretrain" else "finetune"]
            began = time.monotonic()
            log.info("run %d of %d: seed %d, %s%s", sum(map(len, results.values())) + 1, len(RUNS) * seeds,
                     seed, RUNS[name], _to_go(out, seeds, results))  # fmt: skip
            with one_thread():  # steps this small gain nothing from more, and lose much where others use the cores
                result = stage.run(replace(config, out=str(_folder(out, name, seed)), seed=seed, resume="auto"))
            results[name].append(result)
            earlier += max(0.0, result["seconds"] - (time.monotonic() - began))
    return results, earlier


def _to_go(out: Path, seeds: int, results: dict[str, list[dict]]) -> str:
    """About how long the runs without a result take, by those that are done; empty before one of each kind is."""
    each = {name: statistics.mean(run["seconds"] for run in done) for name, done in results.items() if done}
    if not results["idmm"]:
        return ""
    each.setdefault("scratch", each["idmm"])  # the same steps
    open_ = [name for name in RUNS for seed in range(seeds) if not (_folder(out, name, seed) / "result.json").exists()]
    return f"; about {duration(sum(each[name] for name in open_))} left" if open_ else ""


def _folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-{seed}"


def _summary(runs: dict[str, list[dict]], settings: dict) -> dict:
    tuned, scratch = ([result["top1"] for result in runs[name]] for name in ("idmm", "scratch"))
    first = runs["idmm"][0]
    return {
        "idmm_top1": tuned,
        "scratch_top1": scratch,
        "pixel_knn": [result["pixel_knn"] for result in runs["idmm"] if "pixel_knn" in result],
        "gain": statistics.mean(tuned) - statistics.mean(scratch),
        "seconds": 0.0,
        "unlabelled_images": runs["pretrain"][0]["train_size"],
        "labelled_images": first["train_size"],
        "test_images": first["test_size"],
        "num_classes": first["num_classes"],
        "largest_class": first["largest_class"],
        "settings": settings,
    }


def _pictures(out: Path, result: dict, stage1: PretrainConfig) -> None:
    """Draws the losses, the crops of seed 0 and the comparison."""
    from idmm.commands.crops import crop_blocks
    from idmm.pictures import curves_figure, save
    from idmm.report import pictures
    from idmm.stages.assemble import assemble, load_splits

    def curves(name: str, stage: str) -> list[list[dict]]:
        """Losses and learning rates of each seed; under the stage's name they share no panel with another's."""
        files = [_folder(out, name, seed) / "metrics.jsonl" for seed in range(result["settings"]["seeds"])]
        values = {f"{stage}: loss": "loss", f"{stage}: learning rate": "lr"}
        return [[{title: one[key] for title, key in values.items()} for one in json_lines(file)] for file in files]

    labelled, unlabelled = result["labelled_images"], result["unlabelled_images"]
    runs = {
        "from IDMM": curves("idmm", "fine-tuning"),  # the first two have their colours in comparison.png and a report
        "from scratch": curves("scratch", "fine-tuning"),
        "IDMM": curves("pretrain", "pretraining"),
    }
    title = f"{unlabelled:,} images without labels, {labelled:,} with"
    save(curves_figure(runs, title, columns=(2,)), out / "loss.png")

    parts = assemble(STAGES["pretrain"].resolve(stage1)[0])
    given = dict(mean=parts.spec.mean, std=parts.spec.std, cutmix_alpha=parts.config.method.cutmix_alpha)
    pictures.image_sheet(crop_blocks(load_splits(parts).train, parts.config.views, **given), out / "crops.png")

    scores = {label: result[name] for label, name in reversed(ROWS.items()) if result.get(name)}
    title = (
        f"{labelled:,} labelled images: {result['gain']:+.1f} points\nby pretraining on {unlabelled:,} without labels"
    )
    given = {"one_class": result["largest_class"], "untaught": ["raw pixels"]}
    pictures.comparison(scores, out / "comparison.png", title, **given)


def _say(out: Path, result: dict) -> None:
    seeds = result["settings"]["seeds"]
    print(
        f"{result['unlabelled_images']} images without labels, {result['labelled_images']} with; "
        f"top-1 on {result['test_images']} test images, {seeds} seed{'' if seeds == 1 else 's'}:"
    )
    for label, name in ROWS.items():
        if not (values := result.get(name)):  # pixels are compared where that is cheap
            continue
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"  {label:<13} {statistics.mean(values):5.1f}{spread} %   ({each})")
    print(f"  gain          {result['gain']:+5.1f} points, in {result['seconds']:.0f} s")
    print(f"{out / 'demo.json'} and {', '.join(PICTURES)} beside it")
