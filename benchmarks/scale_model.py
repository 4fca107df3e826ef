"""What a step of IDMM takes: memory, arithmetic and communication as formulas, and the paper's runs in FLOPs.

Everything is counted in bytes, FLOPs (a multiplication and an addition are two) and seconds. Peaks are what the makers
state; which share of them is reached is an input (``mfu``), and no figure from here was measured.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

FP32 = 4  # bytes
MIB, GB = 2**20, 1e9
# As idmm/losses/instance.py has it: logits of a tile on a GPU, and those of tiles that are kept for the backward pass
TILE, KEPT = 2**23, 2**28


@dataclass(frozen=True)
class Device:
    """A GPU by its maker's data sheet (dense products, SXM): FLOP/s, bytes, bytes/s."""

    name: str
    bf16: float
    tf32: float
    fp32: float
    memory: float
    bandwidth: float  # of its memory
    host: float  # to the host's memory, each way (PCIe 4 and 5, 16 lanes)
    watts: float  # of a board at most


A100 = Device("A100 80 GB", 312e12, 156e12, 19.5e12, 80e9, 2.04e12, 32e9, 400)
H100 = Device("H100", 989.4e12, 494.7e12, 66.9e12, 80e9, 3.35e12, 64e9, 700)
H200 = Device("H200", 989.4e12, 494.7e12, 66.9e12, 141e9, 4.8e12, 64e9, 700)
DEVICES = (A100, H100, H200)
# What a rank can send at a time (bytes/s), by the links' stated rates
NETWORKS = {"NVLink 4": 450e9, "InfiniBand 400 Gb/s": 50e9, "Ethernet 100 Gb/s": 12.5e9, "Ethernet 10 Gb/s": 1.25e9}


@dataclass(frozen=True)
class Assumed:
    """What is assumed of a machine: a device, and which share of its peak is reached."""

    device: Device = H100
    mfu: float = 0.2  # of the backbone, against the bf16 peak
    layer: str = "fp32"  # type of the N-way layer's products: fp32, tf32 or bf16
    layer_mfu: float = 0.6

    @property
    def layer_peak(self) -> float:
        """FLOP/s of the N-way layer's products."""
        return getattr(self.device, self.layer)


@dataclass(frozen=True)
class Step:
    """A step over all ranks."""

    n: int  # images of the data set, rows of W
    d: int = 192  # width of the features
    images: int = 256  # of the batch, over all ranks
    views: int = 6  # crops of an image
    ranks: int = 1
    crop_flops: float = 0.568e9  # of the backbone's forward pass of a crop
    params: float = 5.5e6  # of the backbone

    @property
    def rows(self) -> int:
        """Features of a step, over all ranks."""
        return self.images * self.views

    # ------------------------------------------------------------------ memory (bytes a rank)
    def states(self, sharded: bool) -> float:
        """W, its gradient, and AdamW's two moments: 4 x 4 bytes a parameter. Sharded, each rank has its part of the
        rows. Whole on several ranks, DistributedDataParallel copies the gradient into buckets of the same size."""
        copies = 4 if sharded or self.ranks == 1 else 5
        return copies * FP32 * self.n * self.d / (self.ranks if sharded else 1)

    def features(self, sharded: bool) -> float:
        """The N-way layer's inputs and their gradient: a rank's own, or with sharded W those of all ranks."""
        return 2 * FP32 * self.d * self.rows / (1 if sharded else self.ranks)

    def all_logits(self) -> float:
        """Logits of a rank: rows/R x N with whole W, and as many, rows x N/R, with sharded W."""
        return self.rows * self.n / self.ranks

    def logits(self, held: bool, kept: int = KEPT) -> float:
        """All logits of a rank and their gradient (``held``); or some of them and two tiles."""
        all_ = self.all_logits()
        return FP32 * (2 * all_ if held else min(all_, kept) + 2 * min(all_, TILE))

    def backbone_states(self) -> float:
        """Parameters, gradient and moments of the backbone, whole on each rank."""
        return (4 if self.ranks == 1 else 5) * FP32 * self.params

    # ------------------------------------------------------------------ arithmetic (FLOPs a rank)
    def layer_flops(self, kept: int = KEPT) -> float:
        """Products of rows x N x d, a rank's R-th part: logits, the features' gradient, W's gradient, and once more
        the logits that were not kept for the backward pass.

        Whole W: rows/R views against N rows. Sharded: all rows of views against N/R. So sharding saves no arithmetic:
        only more ranks for the same batch do.
        """
        all_ = self.all_logits()
        return (6 * all_ + 2 * max(0, all_ - kept)) * self.d

    def softmax_bytes(self) -> float:
        """Memory traffic of the logits where no kernel fuses them with a product: they are written, read for the
        logsumexp, read and written as softmax, and read by two products."""
        return 6 * FP32 * self.all_logits()

    def backbone_flops(self) -> float:
        """Forward and backward passes of a rank's crops: three times the forward pass (each product has two more of
        its size in the backward pass)."""
        return 3 * self.crop_flops * self.rows / self.ranks

    # ------------------------------------------------------------------ communication (bytes that a rank sends)
    def sent(self, sharded: bool) -> float:
        """What the N-way layer adds. A ring's all-reduce of x bytes sends 2 (R-1)/R x, a gather or a reduce-scatter
        half of that (Patarasuk and Yuan, 2009).

        Whole: the gradient [N, d] is all-reduced. Sharded, as idmm/losses/instance.py does it: features are gathered
        and their gradient is all-reduced (a reduce-scatter would send a third less of both); of each view the largest
        logit and four sums are all-reduced, and the gradient of these is gathered.
        """
        share = (self.ranks - 1) / self.ranks
        if sharded:
            return share * FP32 * self.rows * (3 * self.d + 2 + 2 * 4 + 4)
        return 2 * share * FP32 * self.n * self.d

    def backbone_sent(self) -> float:
        """The all-reduce of the backbone's gradient."""
        return 2 * (self.ranks - 1) / self.ranks * FP32 * self.params

    # ------------------------------------------------------------------ seconds
    def adam_bytes(self, sharded: bool) -> float:
        """Memory traffic of AdamW over W: reads weight, gradient and moments, writes all but the gradient."""
        return 7 * FP32 * self.n * self.d / (self.ranks if sharded else 1)

    def seconds(self, assumed: "Assumed", network: float, sharded: bool) -> dict[str, float]:
        """Returns the parts of a step (s). Communication is set against the rest as if the two overlapped wholly: the
        step takes the longer of them, at best."""
        device = assumed.device
        return {
            "backbone": self.backbone_flops() / (assumed.mfu * device.bf16),
            "layer": self.layer_flops() / (assumed.layer_mfu * assumed.layer_peak),
            "softmax": self.softmax_bytes() / device.bandwidth,
            "adam": self.adam_bytes(sharded) / device.bandwidth,
            "network": (self.sent(sharded) + self.backbone_sent()) / network,
        }


def batch_of(ranks: int, a_rank: int = 256, most: int = 16384) -> int:
    """Returns the images of a step: so many a rank, but no more than ``most`` in all."""
    return min(a_rank * ranks, most)


def break_even(d: int, crop_flops: float, times_slower: float = 1.0) -> float:
    """Returns the N at which the N-way layer's products take as long as the backbone: 8 N d = 3 F (logits made twice),
    whatever the number of crops; fewer where the layer's FLOPs take longer than the backbone's."""
    return 3 * crop_flops / (8 * d) / times_slower


def network_bound(step: Step, assumed: Assumed, network: float) -> float:
    """Returns the N from which on the all-reduce of whole W takes longer than the rest of a step; inf: never.

    Both grow with N, the all-reduce from what the backbone's gradient takes, the rest from the backbone's own.
    """
    base, each = (replace(step, n=n).seconds(assumed, network, False) for n in (0, 1))
    rest = sum(each[part] - base[part] for part in ("layer", "softmax", "adam"))
    grows, ahead = each["network"] - base["network"] - rest, base["backbone"] - base["network"]
    if ahead <= 0:
        return 0.0
    return ahead / grows if grows > 0 else math.inf


# ---------------------------------------------------------------------- backbones
@dataclass(frozen=True)
class Counted:
    """A backbone at a size."""

    flops: float  # of the forward pass of one image
    params: float
    width: int  # of its features


@cache
def counted(name: str, size: int) -> Counted:
    """Counts a backbone's forward pass with torch.utils.flop_counter (products and convolutions, attention's too).

    The backward pass is taken as twice that, not counted: the counter knows no groups there and finds 20 times the
    forward pass in PVTv2, whose convolutions are depthwise. For DeiT-Tiny it counts 2.97 times the forward pass in all.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from idmm.models.build import create_backbone

    device = "cpu" if name.startswith("t2t") else "meta"  # T2T-ViT computes its positions
    with torch.device(device):
        model = create_backbone(name, size, num_classes=0).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        features = model(torch.empty(2, 3, size, size, device=device))
    return Counted(counter.get_total_flops() / 2, sum(p.numel() for p in model.parameters()), features.shape[1])


TINY, BASE, B0, B3, T7 = "deit_tiny_patch16_224", "deit_base_patch16_224", "pvt_v2_b0", "pvt_v2_b3", "t2t_vit_7"
BACKBONES = (TINY, BASE, B0, B3, T7)

# ---------------------------------------------------------------------- the paper's runs
SETS = {"flowers": 2040, "pets": 3680, "dtd": 3760, "indoor67": 5360, "cub": 5994, "aircraft": 6667, "cars": 8144}
ALL7, SIN, IMAGENET = sum(SETS.values()), 10_000, 1_281_167
# Forward passes of an image's crops, of which those with a gradient count three: (with, without). IDMM's six crops;
# SimCLR and SupCon two; MoCo v2 a query and a key; MoCo v3 two of each; DINO six of the student, two of the teacher.
CROPS = {"idmm": (6, 0), "simclr": (2, 0), "supcon": (2, 0), "mocov2": (1, 1), "mocov3": (2, 2), "dino": (6, 2)}
CROPS |= {"supervised": (1, 0), "one crop": (1, 0)}


@dataclass(frozen=True)
class Run:
    """Runs of a kind: ``images`` is their sum over the runs, ``n`` is of each (0: there is no N-way layer)."""

    table: str
    what: str
    model: str
    images: int
    epochs: int
    size: int
    method: str = "supervised"
    n: int = 0
    runs: int = 1

    def flops(self) -> float:
        """Training passes over all images and epochs, and the N-way layer's products; evaluation is left out."""
        with_, without = CROPS[self.method]
        net = counted(self.model, self.size)
        layer = 6 * with_ * self.n * net.width
        return self.images * self.epochs * ((3 * with_ + without) * net.flops + layer)


def _pretrained(
    table: str, model: str, method: str, sets: dict[str, int], size: int = 112, what: str = ""
) -> list[Run]:
    """800 epochs on each of some data sets."""
    has_rows = method in ("idmm", "one crop")
    return [
        Run(table, what or f"pretrain {method}", model, n, 800, size, method, n if has_rows else 0)
        for n in sets.values()
    ]


def _tuned(table: str, model: str, times: int, epochs: int = 200, size: int = 224, images: int = ALL7, runs: int = 7):
    """Fine-tunings of all seven data sets (or others), so many times."""
    return Run(table, f"fine-tune {epochs} at {size} px", model, times * images, epochs, size, runs=times * runs)


def paper() -> list[Run]:
    """The runs of Tables 2 to 9, as Section 4 describes them: 800 epochs of pretraining at 112 px, fine-tuning for 200
    at 224 px but where a table says otherwise. Weights that others trained (ImageNet) are not counted, nor is what
    cannot be known: runs that were tried and not reported."""
    ssl = ("simclr", "supcon", "mocov2", "mocov3", "dino", "idmm")
    runs = [run for method in ssl for run in _pretrained("2", TINY, method, SETS)]
    runs.append(_tuned("2", TINY, len(ssl) + 1))
    for model in BACKBONES:
        runs += [] if model == TINY else _pretrained("3", model, "idmm", SETS)  # Table 2 has DeiT-Tiny's
        runs += [_tuned("3", model, 2, 800), _tuned("3", model, 1, 100, 448), _tuned("3", model, 1, 200)]
    two = {name: SETS[name] for name in ("flowers", "pets")}
    for model in (B0, T7):  # two more pretrainings; five fine-tunings, one of them of both kinds
        runs += 2 * _pretrained("4", model, "idmm", two) + [_tuned("4", model, 5, images=sum(two.values()), runs=2)]
    runs += [run for method in ("simclr", "supcon") for run in _pretrained("5", B0, method, SETS)]
    runs.append(_tuned("5", B0, 3 * 7 + 1))
    sin = {"SIN-10k": SIN}
    four = ("idmm", "mocov3", "dino", "supervised")
    for model, methods in ((B0, four), (B3, four), (T7, ("idmm", "supervised"))):
        runs += [run for method in methods for run in _pretrained("6", model, method, sin)]
        runs.append(_tuned("6", model, len(methods)))
    for model, epochs in ((B0, 4 * 100 + 2 * 300), (TINY, 2 * 100 + 2 * 300)):
        count = 6 if model == B0 else 4
        runs.append(Run("7", "ImageNet at 224 px, 100 and 300 epochs", model, IMAGENET, epochs, 224, runs=count))
    runs += _pretrained("7", B0, "idmm", sin)  # the unbalanced 10,000; Table 9 has DeiT-Tiny's
    flowers = {"flowers": SETS["flowers"]}
    runs += 2 * _pretrained("8", TINY, "one crop", flowers, 224, "pretrain one crop at 224 px")
    runs += _pretrained("8", TINY, "one crop", flowers)
    runs += [*_pretrained("8", TINY, "idmm", flowers), _tuned("8", TINY, 4, images=SETS["flowers"], runs=1)]
    runs += 2 * _pretrained("9", TINY, "idmm", sin) + 2 * _pretrained("9", TINY, "simclr", sin)
    targets = sum(SETS[name] for name in ("flowers", "pets", "dtd", "cub"))
    return [*runs, _tuned("9", TINY, 4, images=targets, runs=4)]
