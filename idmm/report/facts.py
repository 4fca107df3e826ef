"""What a report on runs is made from: plain values and arrays, collected from finished files by ``idmm report``."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from idmm.report.calibration import Calibration
from idmm.report.svg import ImageBlock


def readable(name: str) -> str:
    """Returns a name without what no page and no font can show: control characters, bytes that are no UTF-8."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", name)


@dataclass
class Mistake:
    """A test image that was named wrong."""

    path: str
    truth: str
    predicted: str
    probability: float  # of the predicted class
    image: np.ndarray | None = None  # uint8 [H, W, 3]; None where it cannot be read


@dataclass
class Cloud:
    """Features of test images, laid out in a plane so that neighbours stay neighbours (t-SNE)."""

    labels: np.ndarray  # int64 [M]
    classes: list[str]  # by number
    places: dict[str, np.ndarray]  # title -> float [M, 2]
    # title -> percent of the images, but those that are alone in their class, whose nearest other one has their class,
    # by cosine; empty: all are alone
    nearest: dict[str, float]


@dataclass
class Recipe:
    """The shipped recipe that a config is nearest to."""

    name: str
    differences: list[tuple[str, Any, Any]]  # key, the recipe's value, the run's


@dataclass
class RunFacts:
    """A finished run. What is None is not there, and ``missing`` has a line on why, by the field's name."""

    label: str  # short, no two alike
    number: int  # on the page, from 1
    path: Path
    kind: str  # pretrain, finetune, detect, segment or probe
    about: dict[str, str]  # what it "did", its "start", "model" and "data"; empty where that says nothing
    group: str  # label of the runs that are the same but for the seed
    config: dict[str, Any]  # dotted keys
    result: dict[str, Any]
    records: list[list[dict]]  # of metrics.jsonl, of each fold
    environment: dict[str, Any] = field(default_factory=dict)
    parameters: int | None = None  # numbers in the backbone
    recipe: Recipe | None = None
    detailed: bool = True  # whether the page has sections of its own on it
    # ---- of runs that are shown in detail
    crops: list[ImageBlock] | None = None
    shown: str = ""  # what pictures of its images are, where that is not plain
    predicted: Any = None  # idmm.evaluate.Predictions of the test images
    paths: list[str] = field(default_factory=list)  # names of these images
    classes: list[str] = field(default_factory=list)  # names of the classes, by number
    mistakes: list[Mistake] | None = None
    calibration: Calibration | None = None
    cloud: Cloud | None = None
    explored: dict | None = None  # what explore.json holds
    drawn: np.ndarray | None = None  # predictions.png of boxes or masks, uint8 [H, W, 3]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def classifies(self) -> bool:
        """Whether it made a classifier, which was tested."""
        return self.kind != "probe" and "top1_interval" in self.result

    def told(self, *names: str) -> str:
        """Some of ``about`` in a line; none named: all."""
        words = {"start": "of " if self.kind == "probe" else "from ", "data": "on "}
        return ", ".join(words.get(name, "") + self.about[name] for name in names or self.about if self.about.get(name))
