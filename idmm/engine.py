"""The one training loop, on accelerate. It knows no method and no dataset: a method gives a loss for a batch."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from types import MethodType

import torch
from timm.utils import ModelEmaV3

from idmm import distributed
from idmm.calibrate import choose_workers, keep_compiled, say_estimate, time_training
from idmm.data.loaders import BatchFn, BatchPlan, on_device, training_batches
from idmm.errors import Interrupted, RunError, UserError
from idmm.methods.base import Method
from idmm.monitor import exploded, without_drloc
from idmm.optim import clip_gradients, create_optimizer
from idmm.progress import Progress, epoch_line
from idmm.schedule import learning_rate, warmup_length, weight_decay_schedule
from idmm.seeding import derive, seeded
from idmm.session import Session

log = logging.getLogger("idmm")


@dataclass
class Evaluation:
    """A measurement at the end of every ``every`` epochs, and of the stage."""

    measure: Callable[[torch.nn.Module], dict]
    """Called with the backbone to evaluate (averaged, if EMA is on); returns values for metrics.jsonl."""
    every: int
    images: int  # images that it looks at, for the estimate of time


@dataclass
class StagePlan:
    """What the loop needs to know of a stage."""

    number: int  # from 1
    label: str  # for people
    batches: BatchPlan  # which images make which step
    transform: BatchFn  # makes a batch of image numbers
    lr: float  # peak learning rate
    evaluations: list[Evaluation]  # what is measured between epochs, in this order
    keep: str | None = None
    """Name of a measured value: the weights are kept that had its highest (the earlier of equals); None: the last."""


@dataclass
class Position:
    """Where a stage stands: ``step`` steps into ``epoch``, with the epoch's sums so far."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    first: torch.Tensor | None = None  # loss of the stage's first step; None before it


class Loop:
    """Trains one method through one stage, from wherever the session's checkpoint left it."""

    def __init__(self, session: Session, method: Method, plan: StagePlan):
        self.session, self.method, self.plan, self.train = session, method, plan, session.train
        self.batches: BatchPlan = plan.batches
        self.steps = self.batches.epochs * self.batches.steps_per_epoch
        self.sample = session.start(method, plan.transform, plan.batches)
        self.accelerator = session.accelerator
        with self._memory():
            self._build()
            self.position = Position()
            self.bad_step = torch.full((), -1, device=self.accelerator.device)
            self.kept: dict | None = None  # epoch (from 1), value and weights of the best so far, where there is one
            self._restore()
            self.left = self.steps - self.position.epoch * self.batches.steps_per_epoch - self.position.step
            self.timed = time_training(self)
        self.workers = choose_workers(self)

    def _memory(self) -> contextlib.AbstractContextManager:
        error = distributed.step_too_large(self.batches.batch_size, self.train.accumulate)
        return distributed.enough_memory(error)

    def _build(self) -> None:
        plan, method = self.plan, self.method.to(self.accelerator.device)
        method.train()
        others = {
            name: (child, method.lr_scales.get(name, 1.0))
            for name, child in method.named_children()
            if name != "backbone" and any(p.requires_grad for p in child.parameters())
        }
        optimizer = create_optimizer(method.backbone, others, self.train, plan.lr)
        warmup, shortened = warmup_length(self.train.warmup_epochs, self.batches.steps_per_epoch, self.steps)
        if shortened:
            log.info("%s", shortened)
        falls = [round(epochs * self.batches.steps_per_epoch) for epochs in getattr(self.train, "lr_steps", ())]
        self.schedule = learning_rate(optimizer, self.steps, warmup, self.train.schedule, falls)
        self.set_weight_decay = weight_decay_schedule(optimizer, self.steps, self.train.weight_decay_end)
        self.ema = ModelEmaV3(method.backbone, self.train.ema, use_warmup=True) if self.train.ema else None
        if self.train.compile:
            backbone = method.backbone  # methods call its features and its head one by one
            keep_compiled(self.session.config)
            compiled = torch.compile(backbone.forward_features.__func__)
            backbone.forward_features = MethodType(compiled, backbone)  # of a copy of the backbone, the copy's own
        self.model, self.optimizer = self.accelerator.prepare(method, optimizer)

    @property
    def averaged(self) -> torch.nn.Module:
        """The backbone to evaluate and export: the EMA's, else the one that the method names."""
        return self.method.exported if self.ema is None else self.ema.module

    def fit(self) -> None:
        """Runs the stage to its end.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the state is saved.
            RunError: The loss is no longer finite, memory or disk ran out; the last checkpoint is kept.
        """
        at, plan = self.position, self.plan
        with self._memory():
            loader = training_batches(plan.transform, self.batches, self.workers, at.epoch, at.step)
            say_estimate(self)
        del self.sample  # on a GPU a whole micro-batch
        done = at.epoch * self.batches.steps_per_epoch + at.step
        self.saved = time.monotonic()
        self.progress = Progress(plan.label, self.steps, done, self.session.folder.leader)
        self.session.interrupts.patient = True
        try:
            with self._memory():
                if self.train.minutes is not None and not done:
                    self._save(0, 0)  # a run that is killed goes on with the same number of epochs
                for epoch in range(at.epoch, self.batches.epochs):
                    self._epoch(epoch, loader)
                    self._end_epoch(epoch)
        finally:
            self.session.interrupts.patient = False
            self.progress.close()
        self._save(self.batches.epochs, 0)
        self.session.steps += self.steps

    def trial(self, batches: Generator[dict] | None = None) -> Iterator[tuple[torch.Tensor, int]]:
        """Makes steps as :meth:`fit` does, from the stage's first on and without an end, to be timed: yields the loss
        and the images of each. Nothing else is of use afterwards. ``batches``: in place of those that are loaded."""
        endless = replace(self.batches, epochs=10**9)
        batches = training_batches(self.plan.transform, endless, self.workers) if batches is None else batches
        with self._memory(), contextlib.closing(batches):
            for number in itertools.count():
                epoch, step = divmod(number, self.batches.steps_per_epoch)
                yield self._step(epoch, step, batches), self.batches.step_size(step)

    def _epoch(self, epoch: int, batches) -> None:
        started = time.monotonic() - self.position.seconds
        for step in range(self.position.step, self.batches.steps_per_epoch):
            loss = self._step(epoch, step, batches)
            self.position.step, self.position.seconds = step + 1, time.monotonic() - started
            self.progress.step(self.batches.step_size(step))
            due = time.monotonic() - self.saved >= 60 * self.train.save_minutes
            if self.progress.due():
                due = due or int(self.bad_step) >= 0  # _save stops all processes together
                self.progress.say(loss.item(), self._lr())
            stop, due = distributed.any_process(self.session.interrupts.asked, due)
            if stop or due:
                self._save(epoch, step + 1)
            if stop:
                raise Interrupted(f"interrupted; the same command goes on from epoch {epoch + 1}, step {step + 1}")
        self._check_finite()  # waits for the device
        self.position.seconds = time.monotonic() - started

    def _step(self, epoch: int, step: int, batches) -> torch.Tensor:
        """Makes one optimizer step of ``accumulate`` micro-batches; returns the last one's loss."""
        number = epoch * self.batches.steps_per_epoch + step
        self.schedule.step_update(number)
        self.set_weight_decay(number)
        for micro in range(self.train.accumulate):
            batch = next(batches)
            weight = batch["weight"]
            batch = on_device(batch, self.accelerator.device)
            last = micro == self.train.accumulate - 1
            key = derive(self.session.seed, "step", self.plan.number, number, micro, distributed.rank())
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model), seeded(key):
                out = self.model(batch, key, epoch)
                self.accelerator.backward(out["loss"] * weight)
            self._count(out, weight * self.batches.step_size(step) / distributed.world(), number)
        self.method.before_step(epoch)
        if self.train.clip_grad:
            self.accelerator.unscale_gradients()
            clip_gradients(self.method, self.train.clip_grad, self.train.clip_grad_mode == "tensor")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.method.after_step(number)
        if self.ema is not None:
            self.ema.update(self.method.backbone, step=number + 1)
        return out["loss"].detach()

    def _count(self, out: dict, images: float, number: int) -> None:
        """Adds to the epoch's sums, and remembers the first bad step and loss, without waiting for the device."""
        if number == 0 and self.position.first is None:
            self.position.first = without_drloc(out).detach().float()
        for name, value in out.items():
            value = value.detach().float() * images
            self.position.sums[name] = self.position.sums[name] + value if name in self.position.sums else value
        bad = ~torch.isfinite(out["loss"].detach())
        self.bad_step = torch.where(bad & (self.bad_step < 0), number, self.bad_step)

    def _end_epoch(self, epoch: int) -> None:
        values = {name: value / self.batches.count for name, value in self._sums().items()}
        self._check_exploded(epoch, without_drloc(values))
        seconds = self.position.seconds
        record = {
            "epoch": epoch + 1,
            "stage": self.plan.number,
            "step": self.session.steps + (epoch + 1) * self.batches.steps_per_epoch,
            "loss": values.pop("loss"),
            "lr": self._lr(),
            "seconds": round(seconds, 3),
            "images_per_s": round(self.batches.count / max(1e-9, seconds), 2),
            **values,
            **self._evaluated(epoch),
        }
        self._keep(record)
        if line := epoch_line(record, self.batches.epochs):
            log.info("%s %s", self.plan.label, line)
        self.session.folder.add_metrics(record)
        self.position = Position(epoch + 1, first=self.position.first)

    def _keep(self, record: dict) -> None:
        """Copies the weights of the best epoch so far; they go into the state, as a resumed run needs them."""
        value = record.get(self.plan.keep)
        if value is not None and (self.kept is None or value > self.kept["value"]):
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.averaged.state_dict().items()}
            self.kept = {"epoch": record["epoch"], "value": value, "weights": weights}

    def _evaluated(self, epoch: int) -> dict:
        """What is due to be measured after an epoch."""
        last, values = epoch + 1 == self.batches.epochs, {}
        distributed.share_statistics(self.averaged)  # the first process's weights are exported
        try:
            for item in self.plan.evaluations:
                if last or (epoch + 1) % item.every == 0:
                    values.update(item.measure(self.averaged))
        except Interrupted:
            self._save(epoch, self.batches.steps_per_epoch)
            raise
        return values

    def _sums(self) -> dict[str, float]:
        """The epoch's sums so far, over all processes."""
        names = sorted(self.position.sums)
        sums = distributed.sum_all(torch.stack([self.position.sums[name] for name in names])) if names else names
        return {name: float(value) for name, value in zip(names, sums, strict=True)}

    def _lr(self) -> float:
        group = self.optimizer.param_groups[0]
        return group["lr"] / group.get("lr_scale", 1.0)

    def _check_finite(self) -> None:
        """Raises RunError if any process had a loss that is not finite; all must ask together."""
        bad = [step for step in distributed.gather(int(self.bad_step)) if step >= 0]
        if bad:
            raise self._diverged("the loss is not finite", min(bad))

    def _first_loss(self) -> float | None:
        """Loss of the stage's first step, the largest of all processes; all must ask together."""
        return None if self.position.first is None else max(distributed.gather(float(self.position.first)))

    def _check_exploded(self, epoch: int, loss: float) -> None:
        """Raises RunError if an epoch's loss is of ruined weights; by nothing but what a resumed run knows, too."""
        first = self._first_loss()
        if first is None:
            return
        before = [r for r in self.session.folder.metrics() if r["stage"] == self.plan.number]
        moved = f"from {first:.3g} to {loss:.3g} as the epoch's mean"
        if distributed.broadcast(exploded(loss, first, before, self.batches.steps_per_epoch)):
            raise self._diverged(f"the loss has exploded, {moved},", (epoch + 1) * self.batches.steps_per_epoch - 1)
        if epoch + 1 == self.batches.epochs and exploded(loss, first, [], 0):
            log.warning("the loss has risen %s: the weights are of little use; lower --train.lr", moved)

    def _diverged(self, what: str, step: int) -> RunError:
        epoch, lr = step // self.batches.steps_per_epoch, self.schedule._get_lr(step)[0]
        given = {"clip_grad 1": self.train.clip_grad, "precision fp32": self.session.precision == "fp32"}
        others = [f"set --train.{flag}" for flag, already in given.items() if not already]
        mend = " or ".join(["lower --train.lr", *others])
        where = f"at step {step + 1} (epoch {epoch + 1}, lr {lr:.3g}){self.session.folder.kept}"
        return RunError(f"{what} {where}: {mend}, in a new --out", shared=True)

    def _save(self, epoch: int, step: int) -> None:
        """Writes the checkpoint: all that the rest of the run depends on and that its seed does not give."""
        self._check_finite()
        ruined = not all(bool(torch.isfinite(p).all()) for p in self.method.parameters())
        if distributed.any_process(ruined)[0]:  # by the step after a finite loss
            raise self._diverged("the weights are not finite", epoch * self.batches.steps_per_epoch + step - 1)
        self.saved = time.monotonic()
        sums, first = self._sums(), self._first_loss()
        if not self.session.folder.leader:
            return
        scaler = self.accelerator.scaler
        self.session.folder.save_state(
            {
                "stage": self.plan.number,
                "epoch": epoch,
                "step": step,
                "epoch_seconds": self.position.seconds,
                "seconds": self.session.seconds,
                "sums": sums,
                "first": first,
                "precision": self.session.precision,
                "channels_last": self.session.channels_last,
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": None if self.ema is None else self.ema.module.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "kept": self.kept,
            }
        )

    def _restore(self) -> None:
        state, self.session.folder.state = self.session.folder.state, None
        if state is None:
            return
        try:
            self.method.load_state_dict(state["method"])
        except RuntimeError:
            why = f"the checkpoint does not fit {type(self.method).__name__} as this version builds it"
            raise UserError(f"out: '{self.session.folder.path}': {why}; name a new folder") from None
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.kept = state["kept"]
        share = float(self.session.folder.leader)  # the sums are added up over processes
        sums = {n: torch.tensor(v * share, device=self.accelerator.device) for n, v in state["sums"].items()}
        first = None if state["first"] is None else torch.tensor(state["first"])
        self.position = Position(state["epoch"], state["step"], state["epoch_seconds"], sums, first)
        self.session.folder.take_back(self.plan.number, state["epoch"] + 1)
        at = f"goes on from epoch {state['epoch'] + 1}, step {state['step']}"
        anew = "starts anew, as it had saved no step (train.save_minutes)"
        log.info("%s %s", self.plan.label, at if state["epoch"] or state["step"] else anew)
