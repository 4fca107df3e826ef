"""CCT: its tokens, its blocks and its pooling, its numbers against the public code's, and runs of it."""

import json
import math

import pytest
import safetensors.torch
import timm
import torch
from contract import Contract, filled, load, picture, published
from folders import tree
from helpers import ROOT, inside
from timm.layers import resample_abs_pos_embed

from idmm.config import FinetuneConfig, PretrainConfig, Train
from idmm.config.parsing import parse
from idmm.models import Checkpoint, create_backbone, read_checkpoint
from idmm.models.base import sinusoids
from idmm.optim import create_optimizer, recipe

TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2, "conv_dim": 8}


class TestContract(Contract):
    name = "cct_7_7x2_224"
    kwargs = {"embed_dim": 32, "depth": 2, "num_heads": 2, "attn_drop_rate": 0.0}
    dropout = {"attn_drop_rate": 0.1}
    dim = 32
    resized = ["pos_embed"]
    levels = 2
    layers = [("pos_embed", "patch_embed."), "blocks.0.", ("blocks.1.", "norm.", "seq_pool."), "head."]
    prefix = 0
    reach = 3
    spared = "pos_embed"
    idle = "seq_pool.bias"
    official = {  # of kernels of 7 and 3 pixels, one and two of them; the last is not 224 pixels
        "cct_7_7x2_224": ([-0.00542, -0.39002, 0.45217, -0.31623, -0.14505, -0.12639, -0.01873, 0.07405], 250.76099),
        "cct_2_3x2_32": ([0.05508, -0.35155, -0.194, -0.22425, 0.46105, 0.07423, -0.13001, -0.34057], 245.93576),
        "cct_7_3x1_32": ([0.06327, -0.24923, 0.22176, -0.1281, -0.18623, -0.13849, -0.07999, -0.14194], 190.5486),
    }

    def grid_size(self, model):
        assert model.pos_embed.shape[1] == model.patch_embed.num_patches
        return model.patch_embed.grid_size

    def isolate(self, model):
        for block in model.blocks:
            torch.nn.init.zeros_(block.attn.proj.weight)

    @pytest.mark.parametrize(
        ("size", "grid"), [(112, 7), (224, 14), (448, 28), (16, 1), (17, 2), (50, 4), (100, 7), ((96, 160), (6, 10))]
    )
    def test_sizes(self, size, grid):
        super().test_sizes(size, grid)

    def test_heads(self):
        images = torch.randn(2, 3, 64, 64)
        model = self.build(num_classes=5).eval()
        tokens = model.forward_features(images)
        assert tokens.shape == (2, 16, self.dim) and model.num_prefix_tokens == 0
        assert model.num_features == model.head_hidden_size == model.embed_dim == self.dim
        weights = torch.softmax(tokens @ model.seq_pool.weight[0] + model.seq_pool.bias, 1)
        pooled = model.forward_head(tokens, pre_logits=True)
        torch.testing.assert_close(pooled, (weights[..., None] * tokens).sum(1))
        assert torch.equal(model(images), model.head(pooled)) and model.get_classifier() is model.head
        before = model.seq_pool.weight.clone()
        model.reset_classifier(3)  # the pooling is the backbone's, and stays
        assert model(images).shape == (2, 3) and torch.equal(model.seq_pool.weight, before)
        model.reset_classifier(3, "avg")
        assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens.mean(1))
        assert not any(name.startswith("seq_pool") for name in model.state_dict())
        model.double().reset_classifier(2, "seq")
        assert model.seq_pool.weight.dtype == torch.float64 and not model.seq_pool.training
        assert model(images.double()).shape == (2, 2)
        model.reset_classifier(0, "")
        assert isinstance(model.get_classifier(), torch.nn.Identity) and model(images.double()).shape == (2, 16, 32)
        with pytest.raises(ValueError, match="global_pool is 'token'; wanted is one of 'seq', 'avg', ''"):
            model.reset_classifier(0, "token")
        dropped = self.build(drop_rate=0.9, in_chans=1).train()
        assert (dropped(images[:, :1]) == 0).float().mean() > 0.5


def tiny(size=32, name="cct_2_3x2_32", **kwargs):
    torch.manual_seed(4)
    return create_backbone(name, size, drop_path=0.0, **{**TINY, "attn_drop_rate": 0.0, **kwargs})


@pytest.mark.parametrize(
    ("name", "classes", "published", "exact"),
    [
        ("cct_2_3x2_32", 10, 0.284, 283_723),
        ("cct_4_3x2_32", 10, 0.482, 482_123),
        ("cct_6_3x1_32", 10, 3.168, 3_233_803),  # published without the 256 learned positions of width 256
        ("cct_7_3x1_32", 10, 3.760, 3_760_139),
        ("cct_7_3x2_32", 10, 3.853, 3_853_259),
        ("cct_7_7x2_224", 102, None, 4_573_735),
        ("cct_14_7x2_224", 1000, 22.36, 22_367_273),
    ],
)
def test_parameters_are_the_published_ones(name, classes, published, exact):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=classes)
    count = sum(p.numel() for p in model.parameters())
    assert count == exact
    positions = model.pos_embed.numel() if name == "cct_6_3x1_32" else 0
    assert published is None or abs((count - positions) / 1e6 - published) < 0.01
    size = 32 if name.endswith("_32") else 224
    assert model.patch_embed.img_size == (size, size) and model.default_cfg["input_size"] == (3, size, size)


def windows(x, kernel, stride, padding):
    """Each window of one map [C, H, W], zeros outside, row by row: [C, kernel, kernel]."""
    x = torch.nn.functional.pad(x, [padding] * 4)
    starts = [range(0, side - kernel + 1, stride) for side in x.shape[1:]]
    return [[x[:, i : i + kernel, j : j + kernel] for j in starts[1]] for i in starts[0]]


def naive_norm(layer, x):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * layer.weight + layer.bias


def naive_attention(layer, x):
    """Of one image's tokens [N, D], a head and a query at a time."""
    q, k, v = (x @ layer.qkv.weight.T).split(x.shape[1], -1)
    heads = []
    for columns in torch.arange(x.shape[1]).chunk(layer.num_heads):
        rows = []
        for query in q[:, columns]:
            scores = torch.exp(k[:, columns] @ query / math.sqrt(len(columns)))
            rows.append(scores / scores.sum() @ v[:, columns])
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias


def naive_cct(model, image):
    """Scores of one image [C, H, W] by the paper's equations, with the release's second norm."""
    for conv, *_ in model.patch_embed.convs:
        kernel, (stride, _), (padding, _) = conv.weight, conv.stride, conv.padding
        found = windows(image, kernel.shape[-1], stride, padding)
        image = torch.stack([torch.stack([(kernel * w).sum((1, 2, 3)) for w in row]) for row in found])  # [h, w, D]
        image = image.clamp(min=0).permute(2, 0, 1)
        image = torch.stack([torch.stack([w.amax((1, 2)) for w in row]) for row in windows(image, 3, 2, 1)])
        image = image.permute(2, 0, 1)
    x = torch.stack([image[:, i, j] for i in range(image.shape[1]) for j in range(image.shape[2])])  # [N, D]
    x = x + model.pos_embed[0]
    for block in model.blocks:
        x = naive_norm(block.norm2, x + naive_attention(block.attn, naive_norm(block.norm1, x)))
        hidden = x @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    x = naive_norm(model.norm, x)
    weights = torch.exp(x @ model.seq_pool.weight[0] + model.seq_pool.bias)
    return (weights / weights.sum()) @ x @ model.head.weight.T + model.head.bias


@pytest.mark.parametrize(("name", "size"), [("cct_2_3x2_32", (12, 9)), ("cct_7_7x2_224", (33, 48))])
def test_the_model_is_that_of_the_paper(name, size):
    model = tiny(size, name, num_classes=3).double().train()
    for parameter in model.parameters():  # norms and biases that start at 1 and 0 would hide a mistake
        torch.nn.init.normal_(parameter, std=0.5)
    images = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    got, wanted = model(images), torch.stack([naive_cct(model, image) for image in images])
    torch.testing.assert_close(got, wanted)
    weight = torch.randn_like(got)
    given = {"images": images, **dict(model.named_parameters())}
    pairs = [torch.autograd.grad((scores * weight).sum(), given.values()) for scores in (got, wanted)]
    for key, a, b in zip(given, *pairs, strict=True):
        torch.testing.assert_close(a, b, msg=key, atol=1e-9, rtol=1e-6)
        assert key == "seq_pool.bias" or a.abs().max() > 1e-6, key


def test_starts_as_released():
    model = timm.create_model("cct_7_3x2_32", num_classes=0)
    first, second = (conv[0].weight for conv in model.patch_embed.convs)
    for weight in (first, second):
        assert weight.std().item() == pytest.approx(math.sqrt(2 / weight[0].numel()), rel=0.05)
    biases = [name for name in model.state_dict() if name.endswith("bias")]
    assert not any("qkv" in name or "patch_embed" in name for name in biases)
    assert {block.attn.attn_drop.p for block in model.blocks} == {0.1}
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(images), model(images)) and torch.equal(model.eval()(images), model(images))


def test_positions_are_learned_or_sinusoids_or_none():
    learned, fixed, none = (tiny((32, 48), pos_embed=kind) for kind in ("learn", "sine", "none"))
    assert "pos_embed" in dict(learned.named_parameters()) and learned.no_weight_decay() == {"pos_embed"}
    optimizer = create_optimizer(learned, {}, Train(weight_decay=0.5), lr=0.1)
    (group,) = (g for g in optimizer.param_groups if any(p is learned.pos_embed for p in g["params"]))
    assert group["weight_decay"] == 0
    assert "pos_embed" not in dict(fixed.named_parameters())
    assert torch.equal(fixed.state_dict()["pos_embed"], sinusoids(8 * 12, 16))
    assert "pos_embed" not in none.state_dict()
    same = none.eval().forward_features(torch.zeros(1, 3, 32, 48))[0]
    torch.testing.assert_close(same, same[:1].expand_as(same))  # of a black image, all places are alike
    for model in (learned, fixed, none):
        model.set_input_size((64, 32))
        assert model(torch.randn(2, 3, 64, 32)).shape == (2, 16)
        with pytest.raises(ValueError, match="are 32x48 pixels, but the model was built with img_size 64x32"):
            model(torch.randn(1, 3, 32, 48))
    assert isinstance(learned.pos_embed, torch.nn.Parameter) and learned.pos_embed.requires_grad
    torch.testing.assert_close(fixed.pos_embed, resample_abs_pos_embed(sinusoids(96, 16), [16, 8], [8, 12], 0))
    report = load(none, learned.state_dict(), (64, 32))
    assert report.dropped == ["pos_embed"] and not report.fresh


def test_weights_of_another_size_and_of_the_release():
    small, large = tiny((32, 48)), tiny((64, 40))
    report = load(large, small.state_dict(), (32, 48), strict=True)
    assert report.resized == ["pos_embed"] and not report.fresh and not report.dropped
    assert torch.equal(large.pos_embed, resample_abs_pos_embed(small.pos_embed, [16, 10], [8, 12], 0))
    released = filled(published("cct_2_3x2_32"))
    models = [create_backbone("cct_2_3x2_32", size) for size in (32, 64)]
    reports = [Checkpoint(released, "release.pth").load_into(model) for model in models]
    assert [report.resized for report in reports] == [[], ["pos_embed"]]
    wanted = resample_abs_pos_embed(models[0].pos_embed, [16, 16], [8, 8], 0)
    assert torch.equal(models[1].pos_embed, wanted) and not reports[1].fresh


def test_timm_itself_loads_the_release(tmp_path):
    released = filled(published("cct_2_3x2_32"))
    torch.save(released, tmp_path / "a.pth")
    options = dict(pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "a.pth")})
    model = timm.create_model("cct_2_3x2_32", img_size=48, **options).eval()
    table = released["classifier.positional_emb"]
    assert torch.equal(model.pos_embed, resample_abs_pos_embed(table, [12, 12], num_prefix_tokens=0))
    assert torch.equal(model.head.weight, released["classifier.fc.weight"])
    assert timm.create_model("cct_2_3x2_32", img_size=48, pos_embed="none", **options).pos_embed is None


def test_arguments_that_it_refuses():
    with pytest.raises(ValueError, match="pos_embed is 'sin'; wanted is one of 'learn', 'sine', 'none'"):
        timm.create_model("cct_2_3x2_32", pos_embed="sin")
    for kwargs in ({"conv_layers": 0}, {"kernel_size": 4}, {"kernel_size": 0}):
        with pytest.raises(ValueError, match="wanted are one layer or more, and an odd kernel"):
            timm.create_model("cct_2_3x2_32", **kwargs)
    with pytest.raises(ValueError, match="img_size is 3; wanted is a side or .height, width., of at least 4 pixels"):
        timm.create_model("cct_2_3x2_32", img_size=3)


def test_recipes():
    assert recipe("cct_7_3x1_32") == recipe("cct_14_7x2_224") == (5e-4, 10)
    for name in ("cct_2", "cct_7"):
        for kind, other in ((PretrainConfig, "pretrain/idmm_fast"), (FinetuneConfig, "finetune/paper")):
            files = [f"{ROOT}/configs/{other}.yaml", f"{ROOT}/configs/backbone/{name}.yaml"]
            config = parse(kind, [word for file in files for word in ("--config", file)], "test")
            assert (config.train.lr, config.train.warmup_epochs) == recipe(config.model.name)


def test_pretrained_tuned_with_drloc_and_loaded_by_timm(tmp_path, capsys):
    """At 24 pixels, then at 32 and 48, so that the positions are interpolated twice."""
    few = {"model__name": "cct_2_3x2_32", "model__kwargs": TINY, "model__drop_path": 0.1, "train__epochs": 1}
    few |= {"data__subset": None, "train__batch_size": 10, "data__name": "folder"}
    few["data__root"] = str(tree(tmp_path / "images", train={"a": 10, "b": 10}, val={"a": 2, "b": 2}))
    assert inside("pretrain", tmp_path / "a", views__size=24, **few) == 0
    tune = {**few, "stages": [{"size": 32}, {"size": 48}], "drloc__weight": 0.1, "drloc__pairs": 8}
    assert inside("finetune", tmp_path / "b", init=str(tmp_path / "a"), **tune) == 0
    assert capsys.readouterr().err.count("resized: pos_embed") == 2
    assert 0 <= json.loads((tmp_path / "b" / "result.json").read_text())["top1"] <= 100
    for stem, width in (("backbone", 16), ("model", 2)):
        read = read_checkpoint(tmp_path / "b" / f"{stem}.safetensors")
        model = timm.create_model(read.name, **read.kwargs).eval()
        model.load_state_dict(safetensors.torch.load_file(tmp_path / "b" / f"{stem}.safetensors"), strict=True)
        assert model(torch.zeros(1, 3, 48, 48)).shape == (1, width)
    assert torch.isfinite(model(picture(48))).all()
