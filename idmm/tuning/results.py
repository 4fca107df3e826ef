"""What ``idmm tune`` writes: the file of keys, the table of trials, the picture, and what is printed."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import optuna
import yaml
from matplotlib.figure import Figure

from idmm.evaluate import least_difference, of_few
from idmm.files import write_csv, write_text
from idmm.pictures import COLOURS, plain_axis, save
from idmm.tuning.options import Option, applied, differences, shown
from idmm.tuning.search import FINISHED, Search

WHAT = {"knn": "kNN accuracy", "fewlabel": "accuracy of a linear probe on 5 labels a class"}
PICTURE = "options.png"
BESIDE = "and beside it the flags of the images, the model and the views (--views.size) that idmm tune was given"
FEWEST = 4  # trials, with which something can be said of what matters


def written(search: Search) -> str:
    """Writes tuned.yaml, trials.csv and the picture; returns what is to be printed."""
    out, trials = search.out, search.trials()
    summary, options = _summary(search, trials)
    searched = [t for t in trials if t.user_attrs["seed"] == search.base.seed]
    weights = importances(searched)
    found = differences(search.base, applied(search.base, options, search.base.train.epochs))
    use = [f"idmm pretrain --config RECIPE --config {out / 'tuned.yaml'} --out runs/a", BESIDE]
    write_text(out / "tuned.yaml", _yaml(found, use, summary, weights))
    write_csv(out / "trials.csv", _rows(search, trials))
    _draw(search, out / PICTURE, searched, weights)
    matter = ["which options matter (share of the differences between trials, fANOVA):"]
    matter += [f"  {name:<18}{100 * share:3.0f} %" for name, share in weights.items()]
    said = matter if weights else ["too few trials to say which options matter"]
    files = ", ".join(str(out / name) for name in ("tuned.yaml", "trials.csv", PICTURE))
    said += ["", *summary, f"written: {files}; to pretrain so:", *(f"  {line}" for line in use)]
    return "\n".join([*option_table(search.options, searched), "", *said])


def _summary(search: Search, trials: list) -> tuple[list[str], dict]:
    """Says what the best settings reach; returns that, and them."""
    options, value, recipe, seeds = search.best()
    about, ended = search.study.user_attrs, sum(t.user_attrs["ended"] != FINISHED for t in trials)
    over = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    count, epochs = about["held"], about["epochs"]
    lines = [
        f"{WHAT[search.given.measure]} of the frozen features on {count} {about['where']}, never on test images,",
        f"after {epochs} {'epoch' if epochs == 1 else 'epochs'}; {len(trials)} trials, {ended} of them ended early:",
        f"the recipe {recipe:.1f} %, the best {value:.1f} % ({over})",
    ]
    if options == search.usual:
        few = [line.replace("test images", "images", 1) for line in of_few(value, count)]
        return [*lines, *few, "nothing that was tried is better than the recipe as it is: nothing to set"], options
    points = least_difference(round(value * count / 100), count)
    verdict = "larger than chance" if value - recipe > points else "which may be chance"
    lines.append(f"a difference of {value - recipe:+.1f} points, {verdict}: with {count} images, differences under")
    flattered = f"about {points:.1f} points cannot be told from it, and the best of many is flattered by the choice"
    return [*lines, flattered], options


def _yaml(found: dict, use: list[str], summary: list[str], weights: dict[str, float]) -> str:
    how = ["What idmm tune found; it goes after the recipe that it was measured with:", ""]
    head = [*how, *(f"  {line}" for line in use), "", *summary]
    if weights:
        head.append("what matters: " + ", ".join(f"{n} {100 * share:.0f} %" for n, share in weights.items()))
    if "epochs" in found.get("train", {}):
        head.append("train.epochs: without local crops an epoch costs less; so many take as long as the recipe's")
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return comment + (yaml.safe_dump(found, sort_keys=False, default_flow_style=None) if found else "")


def _rows(search: Search, trials: list) -> Iterator[list]:
    """The rows of trials.csv, the header first."""
    yield ["trial", "seed", *search.usual, "accuracy", "ended", "seconds"]
    for t in trials:
        about, cells = t.user_attrs, search.key(t.params)
        yield [t.number, about["seed"], *cells, t.value, about["ended"], round(about["seconds"], 1)]


# ---------------------------------------------------------------------- what the trials show
def expected(trials: list) -> dict[int, float]:
    """Returns the accuracy of each trial at its end, by number (percent); of one that was ended early what it would be
    with the finished trials' median gain from there on. Those that were never judged are left out.

    Else a bad value of an option, whose trials are all ended early, would seem to make no difference.
    """
    finished, found = [t for t in trials if t.user_attrs["ended"] == FINISHED], {}
    for t in trials:
        if t.value is not None:
            rung = max(t.intermediate_values)
            gains = [f.value - f.intermediate_values[rung] for f in finished if rung in f.intermediate_values]
            found[t.number] = t.value + (median(gains) if gains and t not in finished else 0.0)
    return found


def importances(trials: list) -> dict[str, float]:
    """Returns each option's share in the variance of the trials' :func:`expected` accuracies, largest first, by
    functional ANOVA of a random forest (Hutter, Hoos, Leyton-Brown, ICML 2014); nothing where there are too few."""
    values = expected(trials)
    if len(values) < FEWEST or len(set(values.values())) < 2:
        return {}
    study = optuna.create_study(direction="maximize")
    for t in trials:
        if t.number in values:
            given = {"params": t.params, "distributions": t.distributions, "value": values[t.number]}
            study.add_trial(optuna.trial.create_trial(**given))
    forest = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=forest)


def option_table(options: list[Option], trials: list) -> list[str]:
    """Returns a line for each value of each option: its trials, those ended early, best of the finished and median."""
    values = expected(trials)
    lines = [f"{'option':<18}{'value':>10}{'trials':>8}{'ended early':>13}{'best':>7}{'median':>8}"]
    for option in options:
        for value in option.values:
            those = [t for t in trials if t.params[option.name] == value]
            done = [t.value for t in those if t.user_attrs["ended"] == FINISHED]
            middle = [values[t.number] for t in those if t.number in values]
            cells = [f"{max(done):.1f}" if done else "-", f"{median(middle):.1f}" if middle else "-"]
            name = shown(value) + ("*" if value == option.usual else " ")
            ended = len(those) - len(done)
            lines.append(f"{option.name:<18}{name:>10}{len(those):>8}{ended:>13}{cells[0]:>7}{cells[1]:>8}")
    note = "* the recipe's; a trial that was ended early counts in the median with what the finished ones gained in"
    return [*lines, note, "  the median from there to the end"]


def _draw(search: Search, path: Path, trials: list, weights: dict[str, float]) -> None:
    """Draws a panel for each option: what trials with its values reached, as :func:`expected`, and the medians."""
    values = expected(trials)
    judged = [t for t in trials if t.number in values]
    recipe = next(values[t.number] for t in judged if t.params == search.usual)
    groups = {"a finished trial": (COLOURS[0], [t for t in judged if t.user_attrs["ended"] == FINISHED])}
    groups["one ended early, as the others went on"] = "none", [t for t in judged if t.user_attrs["ended"] != FINISHED]
    figure = Figure(figsize=(0.6 + 2.6 * len(search.options), 3.6), layout="constrained")
    axes = figure.subplots(1, len(search.options), sharey=True, squeeze=False)[0]
    for axis, option in zip(axes, search.options, strict=True):
        place = {t.number: option.values.index(t.params[option.name]) for t in judged}
        for label, (fill, those) in groups.items():
            points = [place[t.number] for t in those], [values[t.number] for t in those]
            axis.scatter(*points, s=22, facecolors=fill, edgecolors=COLOURS[0], zorder=3, label=label)
        tried = sorted(set(place.values()))
        medians = [median(values[number] for number in place if place[number] == p) for p in tried]
        axis.plot(tried, medians, color=COLOURS[1], linewidth=1.4, label="median")
        axis.axhline(recipe, color="0.4", linestyle="--", linewidth=0.9, label="the recipe")
        axis.set_xticks(range(len(option.values)), map(shown, option.values))
        axis.set_xlim(-0.5, len(option.values) - 0.5)
        share = f" ({100 * weights[option.name]:.0f} %)" if option.name in weights else ""
        axis.set_title(f"{option.name}{share}", fontsize=10)
        axis.set_xlabel(textwrap.fill(option.title, 30), fontsize=8)
        plain_axis(axis)
    axes[0].set_ylabel(f"{WHAT[search.given.measure]} (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)
