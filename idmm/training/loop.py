"""The one training loop, on accelerate. It knows no method and no dataset: a method gives a loss for a batch."""

import contextlib
import logging
import time
from dataclasses import dataclass, field
from types import MethodType

import torch
from timm.utils import ModelEmaV3

from idmm import distributed
from idmm.data.loaders import BatchFn, BatchPlan, on_device, training_batches
from idmm.errors import Interrupted, RunError, UserError
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.progress import Bar, brief, duration, epoch_line
from idmm.seeding import derive, seeded
from idmm.training import clock
from idmm.training.calibrate import choose_workers
from idmm.training.clock import Timer
from idmm.training.optim import clip_gradients, create_optimizer
from idmm.training.run_context import RunContext
from idmm.training.schedule import learning_rate, warmup_length, weight_decay_schedule

log = logging.getLogger("idmm")
SHOWN_SECONDS = 0.5  # between two updates of the bar, each of which waits for the device
FIRST_STEPS = 5, 3.0  # steps after the first, or seconds, after which the log has the expected end


@dataclass
class StagePlan:
    """What the loop needs to know of a stage."""

    number: int  # from 1
    label: str  # for people
    epochs: int  # length of the schedules; with ``train.minutes`` those of the recipe
    batches: BatchPlan  # which images make which step; with ``train.minutes`` more epochs than are made
    transform: BatchFn  # makes a batch of image numbers
    lr: float  # peak learning rate
    evaluators: list[Evaluator]  # what is measured between epochs, in this order, of the averaged model
    keep: str | None = None
    """Name of a measured value: the weights are kept that had its highest (the earlier of equals); None: the last."""
    share: float = 1.0  # of the minutes that are left when the phase begins
    max_epochs: int | None = None  # with ``train.minutes``
    ending: tuple[int, float] = (0, 0.0)  # images that are evaluated after the loop, seconds of what else comes then


@dataclass
class Position:
    """Where a stage stands: ``step`` steps into ``epoch``, with the epoch's sums so far."""

    epoch: int = 0
    step: int = 0
    made: int = 0  # steps of the stage
    seconds: float = 0.0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


class Loop:
    """Trains one method through one stage, from wherever the session's checkpoint left it."""

    def __init__(self, run: RunContext, method: Method, plan: StagePlan):
        self.run, self.method, self.plan, self.train = run, method, plan, run.train
        self.batches: BatchPlan = plan.batches
        self.steps = plan.epochs * self.batches.steps_per_epoch  # of the schedules
        images = plan.batches.micro_batches(plan.batches.step_images(0, 0))[0][0]
        with self._memory():
            run.start(method, plan.transform, images)
        self.accelerator = run.accelerator
        with self._memory():
            self._build()
            self.position = Position()
            self.bad_step = torch.full((), -1, device=self.accelerator.device)
            self.best: dict | None = None  # epoch (from 1), value and weights of the best so far, where there is one
            self.timer: Timer | None = None  # of ``train.minutes``, from the first step on
            self.saved_timer: dict | None = None
            self._restore()
        self.paced: tuple[float, int, int] | None = None  # seconds, images and steps since the first step
        self.told, self.shown = False, 0.0  # the expected end; progress when the log last had an epoch
        self.workers = choose_workers(run.workers, plan.transform, images)

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
        if self.train.minutes is not None:
            warmup = clock.WARMUP * self.steps if self.train.warmup_epochs else 0.0
        elif shortened:
            log.info("%s", shortened)
        falls = [round(epochs * self.batches.steps_per_epoch) for epochs in getattr(self.train, "lr_steps", ())]
        self.schedule = learning_rate(optimizer, self.steps, warmup, self.train.schedule, falls)
        self.set_weight_decay = weight_decay_schedule(optimizer, self.steps, self.train.weight_decay_end)
        self.ema = ModelEmaV3(method.backbone, self.train.ema, use_warmup=True) if self.train.ema else None
        if self.train.compile:
            backbone = method.backbone  # methods call its features and its head one by one
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
        total = self.steps if self.train.minutes is None else None
        self.saved = clock.now()
        shown = {"unit": "step", "mininterval": SHOWN_SECONDS, "disable": not self.run.folder.leader}
        self.progress = Bar(desc=plan.label, total=total, initial=at.made, **shown)
        self._start_timer()
        self.shown = self._share(at.epoch)
        self.run.interrupts.deferred = True
        try:
            with self._memory(), contextlib.closing(loader):
                if self.run.precision_was_timed and not at.made:
                    self._save(0, 0)  # the precision is decided once in a run's life
                while not self._over():
                    epoch = self.position.epoch
                    self._epoch(epoch, loader)
                    self._end_epoch(epoch)
        finally:
            self.run.interrupts.deferred = False
            self.progress.close()
        self._save(self.position.epoch, 0)
        self.run.earlier_steps += self.position.made

    # ------------------------------------------------------------------ by the clock
    def _start_timer(self) -> None:
        """Begins to count the phase's share of ``train.minutes``, or goes on with what the state saved."""
        if self.train.minutes is None:
            return
        each, saved = self.batches.steps_per_epoch, self.saved_timer
        start = self.run.seconds if saved is None else saved["start"]
        images, rest = self.plan.ending
        self.timer = Timer(
            start,
            start + self.plan.share * (60 * self.train.minutes - start),
            round(self.train.warmup_epochs * each),
            self.plan.max_epochs and self.plan.max_epochs * each,
            images + sum(item.images for item in self.plan.evaluators),
            rest,
        )
        if saved is not None:
            self.timer.resume(saved)
        self._advance(self.timer.progress)

    def _advance(self, progress: float) -> None:
        """Sets the progress of ``train.minutes``, which the first process measured."""
        if self.timer is not None:
            self.timer.advance(progress, self.position.made)
            self.run.progress = self.timer.progress
            self.method.scheduled_epoch = self.timer.progress * self.plan.epochs

    def _measured(self) -> float:
        """Returns the progress by the first process's clock, 0 in the others and without ``train.minutes``."""
        if self.timer is None or not self.run.folder.leader:
            return 0.0
        return self.timer.measure(self.run.seconds, self.position.made)

    def _over(self) -> bool:
        """Whether the stage is over; asked between two epochs or where the run was stopped."""
        if self.timer is None:
            return self.position.epoch == self.batches.epochs
        return self.timer.progress >= 1 and self.position.step == 0 and self.position.made > 0

    def _is_last(self, epoch: int) -> bool:
        """Whether an epoch that just ended is the stage's last: no time is left for what is due after it and a step."""
        if self.timer is None:
            return epoch + 1 == self.batches.epochs
        due = sum(item.images for item in self.plan.evaluators if (epoch + 1) % item.every == 0)
        needed = self.timer.evaluating(due) + self.timer.image * self.batches.batch_size
        last = self.timer.progress >= 1 or self.timer.left(self.run.seconds) < needed
        if last := distributed.broadcast(last):
            self._advance(1.0)
        return last

    def _say_end(self, each: float) -> None:
        """Logs how many steps there are and when training is expected to end, where a step takes ``each`` seconds."""
        if self.timer is None:
            steps, epochs = f"{self.steps} steps", self.batches.epochs
            looked_at = sum(
                item.images * (-(-epochs // item.every) - self.position.epoch // item.every)
                for item in self.plan.evaluators
            )
            image = each * self.batches.steps_per_epoch / self.batches.count
            takes = (self.steps - self.position.made) * each + clock.FORWARD * image * looked_at
        else:
            takes = max(0.0, self.timer.left(self.run.seconds))
            steps = f"about {self.position.made + takes / each:.0f} steps by train.minutes {self.train.minutes:g}"
        ends = time.strftime("%H:%M", time.localtime(time.time() + takes))
        line = "%s: %s of about %s s each; training ends at about %s, in %s"
        log.info(line, self.plan.label, steps, brief(each), ends, duration(takes))

    # ------------------------------------------------------------------ steps
    def _epoch(self, epoch: int, batches) -> None:
        at, started = self.position, clock.now() - self.position.seconds
        while at.step < self.batches.steps_per_epoch:
            if self.timer is not None and self.timer.progress >= 1 and at.step:
                break
            images, before = self.batches.step_size(at.step), at.seconds
            loss = self._step(epoch, at.step, batches)
            at.step, at.made, at.seconds = at.step + 1, at.made + 1, clock.now() - started
            self._pace(at.seconds - before, images)
            due = clock.now() - self.saved >= 60 * self.train.save_minutes
            if self.progress.due():
                due = due or int(self.bad_step) >= 0  # _save stops all processes together
                left = "" if self.timer is None else f", {duration(self.timer.left(self.run.seconds))} to go"
                self.progress.set_postfix_str(f"loss {loss.item():.4g}, lr {self._lr():.2e}{left}", refresh=False)
            self.progress.update()
            stop, due, progress = distributed.largest(self.run.interrupts.requested, due, self._measured())
            self._advance(progress)
            if stop or due:
                self._save(epoch, at.step)
            if stop:
                raise Interrupted(f"interrupted; the same command goes on from epoch {epoch + 1}, step {at.step}")
        self._check_finite()  # waits for the device
        at.seconds = clock.now() - started

    def _pace(self, seconds: float, images: int) -> None:
        """Counts what a step took, but the first, which compiles and waits for the workers."""
        if self.paced is None:
            self.paced = (0.0, 0, 0)
            return
        seconds, images, steps = (sum(pair) for pair in zip(self.paced, (seconds, images, 1), strict=True))
        self.paced = (seconds, images, steps)
        if self.timer is not None:
            self.timer.image = seconds / images
        most, least = FIRST_STEPS
        if not self.told and (steps == most or seconds >= least):
            self.told = True
            self._say_end(seconds / steps)

    def _step(self, epoch: int, step: int, batches) -> torch.Tensor:
        """Makes one optimizer step of ``accumulate`` micro-batches; returns the last one's loss."""
        number = self.position.made
        at, gone = number, number  # in the schedules, steps
        if self.timer is not None:
            at, gone = self.steps * self.timer.of_schedule(number), self.steps * self.timer.progress
        self.schedule.step_update(at)
        self.set_weight_decay(gone)
        for micro in range(self.train.accumulate):
            batch = next(batches)
            weight = batch["weight"]
            batch = on_device(batch, self.accelerator.device)
            last = micro == self.train.accumulate - 1
            key = derive(self.run.seed, "step", self.plan.number, number, micro, distributed.rank())
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
        self.method.after_step(gone)
        if self.ema is not None:
            self.ema.update(self.method.backbone, step=number + 1)
        return out["loss"].detach()

    def _count(self, out: dict, images: float, number: int) -> None:
        """Adds to the epoch's sums, and remembers the first bad step, without waiting for the device."""
        for name, value in out.items():
            value = value.detach().float() * images
            self.position.sums[name] = self.position.sums[name] + value if name in self.position.sums else value
        bad = ~torch.isfinite(out["loss"].detach())
        self.bad_step = torch.where(bad & (self.bad_step < 0), number, self.bad_step)

    def _end_epoch(self, epoch: int) -> None:
        at, last = self.position, self._is_last(epoch)
        images = min(self.batches.count, at.step * self.batches.batch_size)
        values = {name: value / images for name, value in self._sums().items()}
        record = {
            "epoch": epoch + 1,
            "stage": self.plan.number,
            "step": self.run.earlier_steps + at.made,
            "loss": values.pop("loss"),
            "lr": self._lr(),
            "seconds": round(at.seconds, 3),
            "images_per_s": round(images / max(1e-9, at.seconds), 2),
            **values,
            **self._evaluated(epoch, last),
        }
        self._keep(record)
        before, self.shown = self.shown, self._share(epoch + 1)
        if line := epoch_line(record, None if self.timer else self.batches.epochs, before, self.shown):
            log.info("%s %s", self.plan.label, line)
        self.run.folder.add_metrics(record)
        self.position = Position(epoch + 1, made=at.made)
        if self.timer is not None:
            self._advance(distributed.largest(self._measured())[0])

    def _share(self, epochs: int) -> float:
        """Returns the share of the stage that is over after so many epochs."""
        return epochs / self.batches.epochs if self.timer is None else self.timer.progress

    def _keep(self, record: dict) -> None:
        """Copies the weights of the best epoch so far; they go into the state, as a resumed run needs them."""
        value = record.get(self.plan.keep)
        if value is not None and (self.best is None or value > self.best["value"]):
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.averaged.state_dict().items()}
            self.best = {"epoch": record["epoch"], "value": value, "weights": weights}

    def _evaluated(self, epoch: int, last: bool) -> dict:
        """What is due to be measured after an epoch."""
        values, began = {}, clock.now()
        due = [item for item in self.plan.evaluators if last or (epoch + 1) % item.every == 0]
        distributed.share_statistics(self.averaged)  # the first process's weights are exported
        try:
            for item in due:
                values.update(item(self.averaged))
        except Interrupted:
            self._save(epoch, self.position.step)
            raise
        if self.timer is not None and due:
            self.timer.look = (clock.now() - began) / sum(item.images for item in due)
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

    def _diverged(self, what: str, step: int) -> RunError:
        epoch = step // self.batches.steps_per_epoch
        lr = self.schedule._get_lr(step)[0] if self.timer is None else self._lr()
        given = {"clip_grad 1": self.train.clip_grad, "precision fp32": self.run.precision == "fp32"}
        others = [f"set --train.{flag}" for flag, already in given.items() if not already]
        mend = " or ".join(["lower --train.lr", *others])
        where = f"at step {step + 1} (epoch {epoch + 1}, lr {lr:.3g}){self.run.folder.checkpoint_note}"
        return RunError(f"{what} {where}: {mend}, in a new --out", shared=True)

    def _save(self, epoch: int, step: int) -> None:
        """Writes the checkpoint: all that the rest of the run depends on and that its seed does not give."""
        self._check_finite()
        ruined = not all(bool(torch.isfinite(p).all()) for p in self.method.parameters())
        if distributed.any_process(ruined)[0]:  # by the step after a finite loss
            raise self._diverged("the weights are not finite", self.position.made - 1)
        self.saved = clock.now()
        sums = self._sums()
        if not self.run.folder.leader:
            return
        scaler = self.accelerator.scaler
        self.run.folder.save_state(
            {
                "stage": self.plan.number,
                "epoch": epoch,
                "step": step,
                "steps": [self.run.earlier_steps, self.position.made],  # of the stages before, of this one
                "epoch_seconds": self.position.seconds,
                "seconds": self.run.seconds,
                "timer": None if self.timer is None else self.timer.state(),
                "sums": sums,
                "precision": self.run.precision,
                "channels_last": self.run.channels_last,
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": None if self.ema is None else self.ema.module.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "best": self.best,
            }
        )

    def _restore(self) -> None:
        state, self.run.folder.state = self.run.folder.state, None
        if state is None:
            return
        try:
            self.method.load_state_dict(state["method"])
        except RuntimeError:
            why = f"the checkpoint does not fit {type(self.method).__name__} as this version builds it"
            raise UserError(f"out: '{self.run.folder.path}': {why}; name a new folder") from None
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.best = state["best"]
        self.run.earlier_steps, made = state["steps"]
        self.saved_timer = state["timer"]
        share = float(self.run.folder.leader)  # the sums are added up over processes
        sums = {n: torch.tensor(v * share, device=self.accelerator.device) for n, v in state["sums"].items()}
        self.position = Position(state["epoch"], state["step"], made, state["epoch_seconds"], sums)
        self.run.folder.take_back(self.plan.number, state["epoch"] + 1)
        at = f"goes on from epoch {state['epoch'] + 1}, step {state['step']}"
        anew = "starts anew, as it had saved no step (train.save_minutes)"
        log.info("%s %s", self.plan.label, at if state["epoch"] or state["step"] else anew)
