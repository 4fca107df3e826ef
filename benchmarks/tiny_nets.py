"""Networks of less than a million parameters: accuracy from scratch, size, and latency on one core (docs/backbones.md).

    python benchmarks/small_sets.py ... --out sets                the images, see there
    python benchmarks/tiny_nets.py --sets sets --out runs/tiny

Every network is trained by ``idmm finetune --config fast_scratch`` for 30 epochs, ``--seeds`` times a set. The first
seed of each is exported: the ONNX file's size, latency of one image on one core by onnxruntime (every round times all
networks, one after the other; the median of the rounds). Results are kept as runs end: run it again to go on, or to
print the tables.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETS = {"fashion": 32, "photos": 64}  # side of the images (pixels)
EPOCHS = 30
ROUNDS, IMAGES = 15, 40  # of timing
NETS = {  # what is called, timm's name, arguments at 32 and at 64 px
    "ViT, 64 wide, 4 deep": ("deit_tiny_patch16_224", {"embed_dim": 64, "depth": 4, "num_heads": 2}, {"patch_size": 8}),
    "ResNet-10-T, 16 to 128 channels": ("resnet10t", {"channels": [16, 32, 64, 128]}, {}),
    "MobileNetV4-small x 0.5": ("mobilenetv4_conv_small_050", {}, {}),
}
IDMM = str(Path(sys.executable).with_name("idmm"))


def kwargs(net: str, name: str) -> dict:
    """A network's arguments for the images of a set."""
    _, always, large = NETS[net]
    small = {"patch_size": 4} if "patch_size" in large else {}
    return always | (large if SETS[name] > 32 else small)


def train(net: str, name: str, seed: int, images: Path, out: Path) -> dict:
    """Makes a run; returns its accuracy (percent) and its parameters' number."""
    model = ["--model.name", NETS[net][0], "--model.kwargs", json.dumps(kwargs(net, name))]
    how = ["--train.size", SETS[name], "--train.epochs", EPOCHS, "--seed", seed, "--data.workers", 0]
    command = [IDMM, "finetune", "--config", "fast_scratch", *model, *how, "--data.root", images / name, "--out", out]
    with open(f"{out}.txt", "a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*map(str, command)], stdout=log, stderr=log, env=environment, check=True)
    return {"net": net, "set": name, "seed": seed, "top1": json.loads((out / "result.json").read_text())["top1"]}


def deployed(runs: dict[str, Path]) -> dict[str, dict]:
    """Measures exported networks side by side: parameters, bytes and milliseconds an image."""
    import onnxruntime
    import torch

    from idmm.export.graph import onnx_model
    from idmm.export.source import Source

    found, sessions = {}, {}
    for net, run in runs.items():
        source = Source(run)
        proto, _ = onnx_model(source, source.sample()[0])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        sessions[net] = session, torch.zeros(1, 3, source.size, source.size).numpy()
        found[net] = {"parameters": source.parameters, "bytes": proto.ByteSize()}
    rounds = {net: [] for net in sessions}
    for _ in range(ROUNDS):
        for net, (session, image) in sessions.items():
            began = time.process_time()
            for _ in range(IMAGES):
                session.run(None, {"images": image})
            rounds[net].append((time.process_time() - began) * 1e3 / IMAGES)
    return {net: found[net] | {"ms": statistics.median(times)} for net, times in rounds.items()}


def table(records: list[dict], name: str, about: dict[str, dict]) -> str:
    """Returns a set's table as Markdown."""
    side = SETS[name]
    lines = [f"| {name}, {side} px | parameters | ms an image | MB | top-1 |", "|---|---|---|---|---|"]
    for net, one in about.items():
        tops = [record["top1"] for record in records if (record["net"], record["set"]) == (net, name)]
        spread = f" ± {statistics.stdev(tops):.1f}" if len(tops) > 1 else ""
        shown = [f"{one['parameters'] / 1e6:.2f} M", f"{one['ms']:.2f}", f"{one['bytes'] / 1e6:.2f}"]
        lines.append(f"| {' | '.join([net, *shown, f'{statistics.mean(tops):.1f}{spread}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Makes the runs that are left, then writes results.json and tables.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=Path, required=True, help="folder that small_sets.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "results.json"
    records = json.loads(kept.read_text()) if kept.exists() else []
    done = {(record["net"], record["set"], record["seed"]) for record in records}
    places = {}
    for seed in range(given.seeds):
        for name in SETS:
            for number, net in enumerate(NETS):
                place = given.out / f"{name}-{number}-{seed}"
                places.setdefault(name, {}).setdefault(net, place)
                if (net, name, seed) not in done:
                    records.append(train(net, name, seed, given.sets.resolve(), place))
                    kept.write_text(json.dumps(records, indent=1) + "\n")
                    print(f"{net}, {name}, seed {seed}: {records[-1]['top1']:.1f}", flush=True)
    tables = [table(records, name, deployed(runs)) for name, runs in places.items()]
    (given.out / "tables.md").write_text("\n\n".join(tables) + "\n")
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
