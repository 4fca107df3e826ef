"""How much 8 bits cost and gain, by both ways of onnxruntime, on runs of one's own.

    python benchmarks/int8.py runs/a runs/b --out int8.json

For each run and way: top-1 on its test images with the 95 % interval, the share of images with float32's top class, the
size, and the speed on one core as a multiple of float32's (the fastest of 25 rounds of 32 images, both in each round).
The run's images must be where its config says.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from idmm.export.graph import onnx_model
from idmm.export.quantize import quantized
from idmm.export.source import Source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for run in given.runs:
        source = Source(run)
        proto, _ = onnx_model(source, source.sample()[0])
        for method in ("dynamic", "static"):
            found = quantized(source, proto, method)[1]
            print(f"{run} ({source.saved.name})\n{found}\n", flush=True)
            rows.append({"run": run.name, "model": source.saved.name, **asdict(found)})
    if given.out:
        given.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
