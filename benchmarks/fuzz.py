"""Damaged images, configs, CSV lists and checkpoints: each is read, or the error names it in a sentence.

    python benchmarks/fuzz.py                        # 10,000 cases, under ten minutes on two cores
    python benchmarks/fuzz.py --first 4711 --cases 1 --folder case   # one case again; its file stays in the folder

Case n is drawn from the seed and n. A fault is an exception other than UserError, a sentence that does not name the
file, more than 20 seconds, the death of a process, or code of a checkpoint that ran. Faults are printed, and the exit
code is then 1.
"""

import argparse
import concurrent.futures
import contextlib
import faulthandler
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = ("image", "image", "image", "image", "config", "list", "list", "checkpoint")  # in turn
SECONDS = 20
MARKER, NAMES = "RAN", "pqrstuvwxy"
state: dict = {}  # of a process: the whole files, and its folder


class Payload:
    """A value that makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (MARKER,)


def image_files() -> dict[str, bytes]:
    """Return small valid images by a name with their suffix."""
    import imagecodecs
    import tifffile
    from PIL import Image

    made, colours = {}, np.random.default_rng(0).integers(0, 256, (24, 20, 3)).astype(np.uint8)
    forms = {"RGB": "bmp png jpg webp gif tif ppm jp2 avif", "RGBA": "png webp tif bmp", "P": "png gif tif"}
    forms |= {"1": "tif png", "L": "pgm jpg", "CMYK": "jpg tif", "LA": "png"}
    exif = Image.Exif()
    exif[274] = 6
    for mode, suffixes in forms.items():
        for suffix in suffixes.split():
            file = io.BytesIO()
            Image.fromarray(colours).convert(mode).save(file, Image.registered_extensions()[f".{suffix}"], exif=exif)
            made[f"{mode}.{suffix}"] = file.getvalue()
    deep = colours.astype(np.uint16) * 257
    made |= {"deep.png": imagecodecs.png_encode(deep), "deep.jp2": imagecodecs.jpeg2k_encode(deep)}
    made["deep.ppm"] = b"P6 20 24 65535\n" + deep.astype(">u2").tobytes()
    for name, array in {"a.npy": colours, "deep.npy": deep}.items():
        np.save(file := io.BytesIO(), array)
        made[name] = file.getvalue()
    for name, named in {"lzw.tif": {"compression": "lzw"}, "tile.tif": {"tile": (16, 16)}, "plain.tif": {}}.items():
        tifffile.imwrite(file := io.BytesIO(), deep, photometric="rgb", **named)
        made[name] = file.getvalue()
    return made


def checkpoint_files() -> dict[str, bytes]:
    """Return checkpoints of a tiny model, some with code in them."""
    import safetensors.torch
    import torch

    from idmm.models import create_backbone

    state = create_backbone("test_vit", 32, num_classes=0).state_dict()
    made = {"a.safetensors": safetensors.torch.save(state)}
    nests = {"a.pth": state, "b.ckpt": {"state_dict": {f"backbone.{k}": v for k, v in state.items()}, "epoch": 3}}
    nests |= {"c.pth": {"teacher": {f"module.{k}": v for k, v in state.items()}, "args": argparse.Namespace(lr=1)}}
    nests |= {"code.pth": {"model": state, "args": Payload()}, "code2.pth": Payload()}
    for name, content in nests.items():
        for old in (False, True):
            torch.save(content, file := io.BytesIO(), _use_new_zipfile_serialization=not old)
            made[f"{'old' if old else 'new'}_{name}"] = file.getvalue()
    return made | {"pickle.pth": pickle.dumps(Payload())}


def seeds(kind: str) -> dict[str, bytes]:
    """Return the whole files that those of a kind are made from."""
    if kind == "config":
        return {f"{path.stem}.yaml": path.read_bytes() for path in sorted(CONFIGS.rglob("*train/*.yaml"))}
    if kind == "list":
        rows = [f"{name}.png,{'ab'[n % 2]},train" for n, name in enumerate(NAMES[:8])]
        return {
            "labels.csv": "\n".join(["path,class,split", *rows, "x.png,a,val", "y.png,b,val"]).encode(),
            "exclude.txt": b"p.png\n# no\nq.png\n",
            "groups.csv": "\n".join(f'"{name}.png";g{n // 2}' for n, name in enumerate(NAMES)).encode(),
        }
    return image_files() if kind == "image" else checkpoint_files()


def damaged(content: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """Return a file's bytes after one or more accidents."""
    data = bytearray(content)
    for _ in range(rng.geometric(0.6)):
        place, length = int(rng.integers(len(data) + 1)), int(rng.integers(1, 17))
        if rng.random() < 0.5:  # headers break more than pixels do
            place = min(place, int(rng.integers(128)))
        match rng.integers(7):
            case 0:
                data[place : place + length] = rng.bytes(length)
            case 1:
                del data[max(1, place) :]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = data[place : place + length] * int(rng.integers(1, 4))
            case 4:
                data[place : place + 4] = [b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x80"][rng.integers(4)]
            case 5:
                start = int(rng.integers(len(other)))
                data[place : place + length] = other[start : start + length]
            case _ if place < len(data):
                data[place] ^= 1 << int(rng.integers(8))
    return bytes(data)


def use(kind: str, path: Path, root: Path) -> None:
    """Reads a file as a command would."""
    from idmm.cli import main
    from idmm.config import Data
    from idmm.data.image_store import store_split
    from idmm.data.listing import list_images
    from idmm.data.split import Split
    from idmm.errors import UserError
    from idmm.models import create_backbone
    from idmm.models.weights import read_checkpoint

    if kind == "image":
        data = Data(cache="off", max_pixels=10**7)
        store_split(Split([str(path)], [path.name], None, None), stored_size=None, data=data).image(0)
    elif kind == "config":
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
            with contextlib.suppress(SystemExit):
                if main(["pretrain", "--config", str(path), "--print_config"]):
                    raise UserError(*said.getvalue().splitlines())
    elif kind == "list":
        lists = {"labels": str(root / "labels.csv"), path.stem: str(path)}
        list_images(Data(root=str(root / "images"), **lists), labelled=True)
    else:
        model = create_backbone("test_vit", 32, num_classes=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a refusal is one sentence, without torch's warnings
            read_checkpoint(path).load_into(model)


def case(number: int, seed: int) -> tuple[str, str, str]:
    """Return kind and file of a case, and its outcome: read, refused, or what is wrong."""
    from idmm.errors import UserError

    files, folder = state["files"], state["folder"]
    kind, rng = KINDS[number % len(KINDS)], np.random.default_rng((seed, number))
    name, other = rng.choice(sorted(files[kind]), 2)
    path = folder / "case" / name
    path.write_bytes(damaged(files[kind][name], files[kind][other], rng))
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # of code in C
    try:
        use(kind, path, folder)
        outcome = "read"
    except UserError as error:
        named = name in str(error) or kind == "config" or f"data.{path.stem}" in str(error)
        outcome = "refused" if named else f"not named: {error}"
    except BaseException as error:  # SystemExit and KeyboardInterrupt are faults, too
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {str(error)[:100]!r}"
    signal.alarm(0)
    if Path(MARKER).exists():
        Path(MARKER).rmdir()
        outcome = "code of the file was executed"
    return kind, name, outcome


def begin(folder: Path) -> None:
    """Prepares a process for its cases."""
    signal.signal(signal.SIGALRM, _stop)
    warnings.simplefilter("ignore")
    state.update(files={kind: seeds(kind) for kind in set(KINDS)}, folder=folder / str(os.getpid()))
    for part in ("case", "images"):
        (state["folder"] / part).mkdir(parents=True, exist_ok=True)
    os.chdir(state["folder"])
    for name in NAMES:
        Path(f"images/{name}.png").write_bytes(state["files"]["image"]["RGB.png"])
    Path("labels.csv").write_bytes(state["files"]["list"]["labels.csv"])


def _stop(*_) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def main() -> int:
    """Try all cases and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for the files, by default a temporary one")
    args = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    numbers, counts, started = range(args.first, args.first + args.cases), Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder, spawn = (args.folder or Path(temporary)).absolute(), multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2, spawn, begin, [folder]) as pool:
            each = pool.map(case, numbers, itertools.repeat(args.seed), chunksize=20)
            for number in numbers:
                try:
                    kind, name, outcome = next(each)
                except concurrent.futures.process.BrokenProcessPool:
                    print(f"a process died or hung within 40 cases from case {number} on", file=sys.stderr)
                    return 1
                verdict = outcome if outcome in ("read", "refused") else "FAULT"
                counts[kind, verdict] += 1
                if verdict == "FAULT":
                    print(f"case {number}: {kind} {name}: {outcome}", file=sys.stderr, flush=True)
    table = ", ".join(f"{kind} {verdict} {count}" for (kind, verdict), count in sorted(counts.items()))
    print(f"{args.cases} cases, seed {args.seed}, {time.monotonic() - started:.0f} s: {table}")
    return 1 if any(verdict == "FAULT" for _, verdict in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
