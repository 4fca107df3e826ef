"""What datasets and recipes there are, as text; quick to print, as nothing but the registry is imported."""

import textwrap

from idmm.config.commands import ConfigsConfig, DataInfoConfig, DataListConfig
from idmm.config.reading import STAGES, about, recipes
from idmm.data.registry import DATASETS, spec_of
from idmm.progress import aligned


def table(_: DataListConfig) -> str:
    """Returns the datasets, a line each."""
    rows = [("name", "classes", "train", "test", "download", "what it is")]
    for spec in DATASETS.values():
        figures = [spec.num_classes, spec.train_size, spec.test_size]
        how = "yes" if spec.archives else "no" if spec.manual else "not needed"
        rows.append((spec.name, *("" if n is None else f"{n:,}" for n in figures), how, spec.title))
    return "\n".join(aligned(rows, right=(1, 2, 3)))


def info(given: DataInfoConfig) -> str:
    """Returns all that is known of a dataset before it is opened."""
    spec = spec_of(given.name)
    figures = [("classes", spec.num_classes), ("training images", spec.train_size), ("test images", spec.test_size)]
    lines = [f"{spec.name}: {spec.title}"]
    lines += [f"  {what + ':':<18}{n:,}" for what, n in figures if n is not None]
    metric = "top-1" if spec.metric == "top1" else "top-1, and the mean over classes (mean_per_class)"
    facts = [("reported", metric), ("cite", spec.citation), ("licence", spec.licence), ("source", spec.source)]
    lines += [f"  {what + ':':<18}{text}" for what, text in facts if text]
    if spec.layout:
        lines += ["  files under data.root:", *(f"    {p}" for p in spec.layout)]
    if spec.archives:
        lines += [f"  'idmm data download {spec.name} --root DIR' fetches:", *(f"    {a.url}" for a in spec.archives)]
    elif spec.manual:
        text = f"cannot be downloaded: {spec.manual}"
        lines += textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def recipe_list(_: ConfigsConfig) -> str:
    """Returns the recipes that ship, a line each, those of a stage by the names that its command takes."""
    groups = {stage: [f"idmm {stage} --config NAME:"] for stage in STAGES}
    groups["others"] = ["--config FOLDER/NAME, most of them after one of the above:"]
    for key, path in recipes().items():
        folder, _, name = key.partition("/")
        group, shown = (folder, name) if folder in STAGES else ("others", key)
        groups[group].append(f"  {shown:<37}{about(path)}")
    return "\n".join(line for lines in groups.values() for line in lines)
