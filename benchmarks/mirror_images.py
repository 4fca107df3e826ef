"""What test-time augmentation gains (docs/using.md): accuracy of runs alone, and by the mean with mirror images.

idmm train DIR --minutes 1.5 --seed 0 --out runs/photos-0    # and so on, a seed each
python benchmarks/mirror_images.py --root DIR/test --runs runs/photos-0 runs/photos-1 runs/photos-2
"""

import argparse
import time
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

import idmm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="fine-tuned runs, one a seed")
    parser.add_argument("--root", required=True, help="folder of test images, ROOT/CLASS/*")
    given = parser.parse_args()
    gains, won, lost = [], 0, 0
    for run in given.runs:
        classifier, answers, seconds = idmm.load_classifier(run), [], []
        for tta in (False, True):
            began = time.perf_counter()
            answers.append(classifier.predict(given.root, tta=tta))
            seconds.append(time.perf_counter() - began)
        truth = np.array([Path(path).relative_to(given.root).parts[0] for path in answers[0].paths])
        right = [np.array(found.labels) == truth for found in answers]  # [N] each
        plain, mirrored = (100 * hits.mean() for hits in right)
        gains.append(mirrored - plain)
        won, lost = won + (right[1] & ~right[0]).sum(), lost + (right[0] & ~right[1]).sum()
        ratio = seconds[1] / seconds[0]
        print(f"{run}: {plain:.1f} alone, {mirrored:.1f} with mirror images, {ratio:.2f} times the time", flush=True)
    spread = np.std(gains, ddof=1) if len(gains) > 1 else 0.0
    p = binomtest(int(won), int(won + lost)).pvalue if won + lost else 1.0
    print(f"gain {np.mean(gains):+.2f} ± {spread:.2f} points over {len(gains)} runs of {len(truth)} images; "
          f"{won} images mended, {lost} spoiled, p = {p:.2g} (McNemar)")  # fmt: skip


if __name__ == "__main__":
    main()
