"""What the demo makes of what ``idmm train`` finds (tests/test_train.py)."""

from pathlib import Path

import numpy as np
import pytest
from helpers import call, read, refused
from PIL import Image

from idmm.config import Data
from idmm.data.listing import list_images
from idmm.runs import demo


@pytest.mark.parametrize(("gain", "code"), [(6.0, 0), (1.0, 1)])
def test_the_demo_says_what_was_found_and_draws_it(gain, code, tmp_path, capsys, monkeypatch):
    """Too small a gain is a failure, and its result is kept."""
    asked = []
    out = tmp_path / "demo"

    def train(config):
        asked.append(config)
        result = {"top1": 80 + gain + config.seed, "baseline_top1": 80.5}
        return {
            "result": result | {"test_size": 360, "largest_class": 10.3},
            "scratch": {"top1": 70.0, "baseline_top1": 79.0},
            "counts": {"images": 1437, "labelled": 50},
        }

    monkeypatch.setattr(demo, "train", train)
    assert call(f"demo --out {out} --seeds 2") == code
    printed = capsys.readouterr()
    assert [(one.seed, one.data.labelled.seed) for one in asked] == [
        (0, 0),
        (1, 1),
    ]
    assert all(one.data.labelled.per_class == 5 and one.compare for one in asked)
    result = read(out / "demo.json")
    assert result["gain"] == pytest.approx(gain)
    top1 = {
        "idmm": [80 + gain, 81 + gain],
        "scratch": [70.0] * 2,
        "baseline": [80.5] * 2,
    }
    for name, values in top1.items():
        assert result[f"{name}_top1"] == values
    assert f"{80.5 + gain:.1f} ± 0.7 %" in printed.out
    assert f"{gain:+.1f} points" in printed.out
    assert code == 0 or printed.err.splitlines()[-1].startswith(
        "demo: +1.0 points from the better of scratch and bas"
    )
    with Image.open(out / "comparison.png") as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("RGB")).std() > 5

    digits = list_images(Data(name="digits"), labelled=True).parts
    for part, split in list_images(Data(root=str(out / "images")), labelled=True).parts.items():
        assert split.classes == digits[part].classes
        order = np.argsort([int(Path(name).stem) for name in split.names])
        assert split.labels[order].tolist() == digits[part].labels.tolist()


def test_bad_flags_write_nothing(tmp_path, capsys):
    lines = refused(
        capsys,
        f"demo --out {tmp_path}/o --minutes 0 --seeds 0",
    )
    assert [line.split(":")[0] for line in lines] == ["minutes", "seeds"]
    assert not (tmp_path / "o").exists()
