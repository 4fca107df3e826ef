"""Tune the learning rate and the crop scale of pretraining on held-out training images, with
Optuna.

pip install optuna
OUT=runs/tuned TRIALS=20 EPOCHS=10 python examples/tune_with_optuna.py

Each trial pretrains for EPOCHS epochs on four fifths of the training images. Its score is the kNN
accuracy on the last fifth. No trial reads a test image. The images need labels: scikit-learn's
digits, or FOLDER/train/CLASS/* if FOLDER is set. The same command continues a stopped study.
"""

import os
import shutil
from pathlib import Path

import optuna
import yaml

import idmm
from idmm.errors import RunError

out = Path(os.environ.get("OUT", "runs/tuned"))
trials = int(os.environ.get("TRIALS", "20"))
epochs = int(os.environ.get("EPOCHS", "10"))
folder = os.environ.get("FOLDER")
images = {"root": folder} if folder else {"name": "digits"}
recipe = {
    "model": {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}},
    "method": {
        "classifier": "cosine",
        "classifier_lr_scale": 10,
        "classifier_init": "features",
        "cutmix_alpha": 0,
    },
    "views": {"size": 32, "jitter_prob": 0, "grey_prob": 0, "blur_prob": 0},
    "train": {"epochs": epochs, "batch_size": 32, "monitor_every": 0},
}


def config(lr: float, crop_scale: float) -> dict:
    """Returns the keys of a run; ``crop_scale`` is the smallest share of the image's area in a
    crop."""
    crops = [{"count": 2, "scale": [crop_scale, 1.0]}]
    return recipe | {
        "train": {**recipe["train"], "lr": lr},
        "views": {**recipe["views"], "crops": crops},
    }


def score(trial: optuna.Trial) -> float:
    """Pretrains with a trial's settings; returns the kNN accuracy on the held-out training images
    (percent)."""
    keys = config(
        trial.suggest_float("lr", 1e-4, 1e-2, log=True), trial.suggest_float("crop_scale", 0.1, 0.6)
    )
    keys["train"]["knn_every"] = epochs
    keys |= {
        "data": {**images, "val_fraction": 0.2, "workers": 0},
        "out": str(out / f"trial-{trial.number}"),
    }
    accuracy = idmm.pretrain(keys)["knn"]
    shutil.rmtree(keys["out"])  # the weights of a short trial are of no use
    return accuracy


out.mkdir(parents=True, exist_ok=True)
storage = f"sqlite:///{out}/study.db"
study = optuna.create_study(
    storage=storage, study_name="tune", load_if_exists=True, direction="maximize"
)
if not study.trials:
    # the recipe's values: the others are compared with them
    study.enqueue_trial({"lr": 5e-4, "crop_scale": 0.35})
finished = sum(trial.state.is_finished() for trial in study.trials)
study.optimize(score, n_trials=max(0, trials - finished), catch=RunError)

first = next(trial for trial in study.trials if trial.value is not None)
best = study.best_trial
print(
    f"kNN on held-out training images: first trial {first.value:.1f} %, "
    f"best {best.value:.1f} % with {best.params}"
)
(out / "tuned.yaml").write_text(yaml.safe_dump(config(**best.params)))
root = f" --data.root {folder}" if folder else ""
print(
    f"use the best with: idmm pretrain --config {out}/tuned.yaml{root} "
    "--train.epochs 100 --out runs/a"
)
