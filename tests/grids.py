"""Made-up results of transfer grids."""

import numpy as np

SOURCES = ("flowers", "pets", "dtd", "indoor67", "cub200", "aircraft", "cars")


def cell(
    source="flowers",
    method="idmm",
    backbone="net",
    target="pets",
    seed=0,
    top1=50.0,
    **fields,
):
    """One cell as the runner writes it; ``top1`` None is a missing one."""
    scratch = (source, method) == ("scratch", "none")
    one = {
        "source": source,
        "method": method,
        "backbone": backbone,
        "target": target,
        "pretrain_seed": None if scratch else seed,
        "seed": seed,
        "protocol": "finetune",
        "top1": top1,
        "top1_interval": None,
        "top5": None,
        "mean_per_class": None,
        "knn": None,
        "largest_class": None,
        "baseline_top1": None,
        "start_top1": None,
        "test_size": None,
        "seconds": None if top1 is None else 12.5,
        "status": "missing" if top1 is None else "ok",
        "error": None,
        "log": None,
        "folder": f"runs/finetune/{seed}",
        "key": "ab12",
        "pretrain_folder": None,
        "source_size": None,
        "pretrain_seconds": None,
        "params": None,
        "backbone_params": None,
        "config": {"data": {"name": target}, "seed": seed},
        "pretrain_config": None,
    }
    assert set(fields) <= set(one)
    return {**one, **fields}


def failed(error="it broke", log="runs/finetune/x/log.txt", **fields):
    return cell(
        top1=None,
        **{**fields, "status": "failed", "error": error, "log": log},
    )


def missing(**fields):
    return cell(top1=None, **fields)


def runs(values, **fields):
    """A cell for each value, with seeds of their own."""
    return [cell(seed=seed, top1=value, **fields) for seed, value in enumerate(values)]


def changed(cells, make, **where):
    """The cells, with those that are ``where`` made anew."""
    names = ("source", "method", "backbone", "target", "seed")
    there = [all(one[name] == value for name, value in where.items()) for one in cells]
    assert any(there)
    return [
        make(**{n: one[n] for n in names}) if it else one
        for one, it in zip(cells, there, strict=True)
    ]


def grid(cells, protocol="finetune"):
    """The whole of it, labels in order of appearance."""
    orders = {
        f"{name}s": list(dict.fromkeys(c[name] for c in cells))
        for name in ("source", "method", "backbone", "target")
    }
    return {
        "version": "0.1.0",
        "protocol": protocol,
        **orders,
        "cells": list(cells),
    }


def full(
    sources=3,
    methods=("idmm", "simclr"),
    targets=3,
    seeds=2,
    backbones=("net",),
    protocol="finetune",
    rng=0,
):
    """Cells of a whole grid with scratch, as noisy as real ones."""
    draw = np.random.default_rng(rng)
    labels = SOURCES[:sources]
    levels = np.linspace(85, 55, targets)
    rows = [("scratch", "none"), *((s, m) for s in labels for m in methods)]
    return [
        cell(
            source,
            method,
            backbone,
            target,
            seed,
            round(float(level + good + draw.normal(0, 0.4)), 4),
            protocol=protocol,
            knn=float(level - 20 + good + draw.normal(0, 0.4)) if protocol == "probe" else None,
        )
        for backbone in backbones
        for source, method in rows
        for target, level in zip(SOURCES, levels, strict=False)
        for good in [
            float(draw.normal(0, 1.5)) - (14 if source == "scratch" else 2 * methods.index(method))
        ]
        for seed in range(seeds)
    ]
