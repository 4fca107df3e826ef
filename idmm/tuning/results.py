"""What ``idmm tune`` writes: the file of keys, the table of trials, the picture, and what is printed."""

import csv
import io
from pathlib import Path
from statistics import median

import optuna
import yaml

from idmm.evaluate import least_difference
from idmm.files import write_text
from idmm.report.pictures import option_panels
from idmm.tuning.options import Option, applied, differences
from idmm.tuning.search import LEAST, Search, shown
from idmm.tuning.trial import FINISHED

WHAT = {"knn": "kNN accuracy", "fewlabel": "accuracy of a linear probe on 5 labels a class"}
PICTURE = "options.png"


def written(search: Search, out: Path) -> str:
    """Writes tuned.yaml, trials.csv and the picture; returns what is to be printed."""
    summary, options = _summary(search), search.best()[0]
    searched = [t for t in search.trials() if t.user_attrs["seed"] == search.base.seed]
    weights, table = importances(searched), option_table(search.options, searched)
    found = differences(search.base, applied(search.base, options, search.base.train.epochs))
    write_text(out / "tuned.yaml", _yaml(found, summary, weights))
    write_text(out / "trials.csv", _csv(search))
    _draw(search, out / PICTURE, searched, weights)
    matter = ["which options matter (share of the differences between trials, fANOVA):"]
    matter += [f"  {name:<18}{100 * share:3.0f} %" for name, share in weights.items()]
    files = ", ".join(str(out / name) for name in ("tuned.yaml", "trials.csv", PICTURE))
    said = matter if weights else ["too few trials to say which options matter"]
    return "\n".join([*table, "", *said, "", *summary, f"written: {files}"])


def _summary(search: Search) -> list[str]:
    options, value, recipe, seeds = search.best()
    about, trials = search.study.user_attrs, search.trials()
    ended = len(trials) - len(search.trials(FINISHED))
    over = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    count, epochs = about["held"], about["epochs"]
    lines = [
        f"{WHAT[search.given.measure]} of the frozen features on {count} {about['where']}, never on test images,",
        f"after {epochs} {'epoch' if epochs == 1 else 'epochs'}; {len(trials)} trials, {ended} of them ended early:",
        f"the recipe {recipe:.1f} %, the best {value:.1f} % ({over})",
    ]
    if options == search.usual:
        return [*lines, "nothing that was tried is better than the recipe as it is"]
    points = least_difference(round(value * count / 100), count)
    verdict = "larger than chance" if value - recipe > points else "which may be chance"
    lines.append(f"a difference of {value - recipe:+.1f} points, {verdict}: with {count} images, differences under")
    return [
        *lines,
        f"about {points:.1f} points cannot be told from it, and the best of many is flattered by the choice",
    ]


def _yaml(found: dict, summary: list[str], weights: dict[str, float]) -> str:
    how = ["What idmm tune found; it goes after the recipe that it was measured with:", ""]
    head = [*how, "  idmm pretrain --config RECIPE --config tuned.yaml ...", "", *summary]
    if weights:
        head.append("what matters: " + ", ".join(f"{n} {100 * share:.0f} %" for n, share in weights.items()))
    if "epochs" in found.get("train", {}):
        head.append("train.epochs: without local crops an epoch costs less; so many take as long as the recipe's")
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return comment + (yaml.safe_dump(found, sort_keys=False, default_flow_style=None) if found else "")


def last(trial: optuna.trial.FrozenTrial) -> float | None:
    """Returns the accuracy that was measured last (percent); None: the trial ended before."""
    values = trial.intermediate_values
    return values[max(values)] if values else None


def expected(trials: list) -> dict[int, float]:
    """Returns the accuracy of each trial at its end, by number (percent); of one that was ended early what it would be
    with the finished trials' median gain from there on. Those that were never judged are left out.

    Else a bad value of an option, whose trials are all ended early, would seem to make no difference.
    """
    finished, found = [t for t in trials if t.user_attrs["ended"] == FINISHED], {}
    for t in trials:
        if (value := last(t)) is not None:
            rung = max(t.intermediate_values)
            gains = [f.value - f.intermediate_values[rung] for f in finished if rung in f.intermediate_values]
            found[t.number] = value + (median(gains) if gains and t not in finished else 0.0)
    return found


def _csv(search: Search) -> str:
    text, names = io.StringIO(), [option.name for option in search.options]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "seed", *names, "accuracy", "ended", "seconds"])
    for t in search.trials():
        about, cells = t.user_attrs, [t.params[name] for name in names]
        writer.writerow([t.number, about["seed"], *cells, last(t), about["ended"], round(about["seconds"], 1)])
    return text.getvalue()


def _draw(search: Search, path: Path, trials: list, weights: dict[str, float]) -> None:
    panels, values = {}, expected(trials)
    recipe = next(t for t in trials if t.params == search.usual and t.number in values)
    for option in search.options:
        share = f" ({100 * weights[option.name]:.0f} %)" if option.name in weights else ""
        points = {shown(value): [] for value in option.values}
        for t in trials:
            if t.number in values:
                points[shown(t.params[option.name])].append((values[t.number], t.user_attrs["ended"] == FINISHED))
        panels[f"{option.name}{share}"] = option.title, points
    option_panels(panels, path, f"{WHAT[search.given.measure]} (%)", values[recipe.number])


def importances(trials: list) -> dict[str, float]:
    """Returns each option's share in the variance of the trials' :func:`expected` accuracies, largest first, by
    functional ANOVA of a random forest (Hutter, Hoos, Leyton-Brown, ICML 2014); nothing where there are too few."""
    values = expected(trials)
    if len(values) < LEAST or len(set(values.values())) < 2:
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
    lines.append(
        "* the recipe's; a trial that was ended early counts in the median with what the finished ones gained in"
    )
    return [*lines, "  the median from there to the end"]
