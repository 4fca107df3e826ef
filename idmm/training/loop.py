"""The training loop, on accelerate. It knows no method and no dataset."""

import contextlib
import math
from collections.abc import Generator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor

from idmm import distributed
from idmm.batch import Batch, BatchFn
from idmm.data.device_views import DeviceViews
from idmm.data.loaders import choose_workers, on_device, training_batches
from idmm.errors import Interrupted, RunError
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.models.base import Backbone
from idmm.progress import Bar, log
from idmm.seeding import derive, seeded
from idmm.training import clock
from idmm.training.device import enough_memory
from idmm.training.failures import FirstBadStep, diverged, no_memory_to_train
from idmm.training.log import epoch_line
from idmm.training.optim import clip_gradients, create_optimizer
from idmm.training.pace import Pace
from idmm.training.plan import Best, PhasePlan, Position, TrainingState
from idmm.training.run import Run, TrainConfig
from idmm.training.schedule import learning_rate_of, weight_decay_schedule

Loader = Generator[Batch, None, None]
BAR_SECONDS = 0.5  # between two updates of the bar, each of which waits for the device
COMPILE_FROM = {"cuda": 300.0}  # expected seconds, by device, from which compilation pays


class Loop:
    """Trains a method through one phase, from its first step or from the run's checkpoint.

    Args:
        run: Open.
        method: Its loss is trained. It is moved to the device by :meth:`start`.
        plan: Of the phase.

    Attributes:
        position: Where the phase stands.
        ema: Averaged weights, if the config has them.
        best: The best epoch so far, with ``train.keep`` best.
    """

    accelerator: Accelerator
    optimizer: AcceleratedOptimizer
    schedule: Scheduler
    batch_fn: BatchFn
    bad_step: FirstBadStep
    bar: Bar

    def __init__(self, run: Run[TrainConfig], method: Method, plan: PhasePlan):
        self.run = run
        self.method = method
        self.plan = plan
        self.train = run.config.train
        self.batches = plan.batches
        self.clock = plan.clock
        self.steps = plan.clock.length.steps
        self.position = Position()
        self.ema: ModelEmaV3 | None = None
        self.best: Best | None = None
        self.saved_at = -math.inf  # the first step saves a new run's state
        self.logged_share = 0.0

    def start(self) -> None:
        """Decide precision and place of the views, build the optimizer, and load the checkpoint.

        Raises:
            UserError: The checkpoint is damaged.
            RunError: Memory ran out.
        """
        images = next(self.batches.requests()).images
        with self._memory():
            self.accelerator = self.run.start(self.method, self.plan.transform, images)
            self._build()
            self.batch_fn = self.run.place_views(self.plan.transform)
            if self.train.compile:  # type: ignore[operator]  # mypy takes it for a method
                self._compile()
            self.bad_step = FirstBadStep(self.accelerator.device)
            self._resume()
        self.workers = choose_workers(self.run.config.data.workers, self.batch_fn, images)
        self.pace = Pace(self.workers, self.train.accumulate)

    def _memory(self) -> contextlib.AbstractContextManager[None]:
        return enough_memory(no_memory_to_train(self.batches.batch_size, self.train.accumulate))

    def _build(self) -> None:
        method = self.method.to(self.accelerator.device)
        method.train()
        lr = self.plan.phase.lr
        assert lr is not None  # of a resolved config
        optimizer = create_optimizer(method.backbone, method.others(), self.train, lr)
        steps_per_epoch = self.batches.steps_per_epoch
        self.schedule = learning_rate_of(self.train, optimizer, steps_per_epoch, self.steps)
        self.set_weight_decay = weight_decay_schedule(
            optimizer, self.steps, self.train.weight_decay_end
        )
        if self.train.ema:
            self.ema = ModelEmaV3(method.backbone, self.train.ema, use_warmup=True)
        self.model, self.optimizer = self.accelerator.prepare(method, optimizer)

    def _compile(self) -> None:
        self.method.compile()
        if isinstance(self.batch_fn, DeviceViews):
            self.batch_fn.compile()

    @property
    def exported(self) -> Backbone:
        """The backbone to evaluate and export: the EMA's, else the one that the method exports."""
        if self.ema is None:
            return self.method.exported
        averaged: Backbone = self.ema.module
        return averaged

    def fit(self) -> None:
        """Train the phase to its end.

        Raises:
            Interrupted: Ctrl-C or another stop signal. The state is saved.
            RunError: The loss is not finite, or memory or disk ran out. The last checkpoint is
                kept.
        """
        position = self.position
        with self._memory():
            loader = training_batches(
                self.batch_fn, self.batches, self.workers, position.epoch, position.step
            )
        if self.run.earlier_steps or position.total_steps:
            self.saved_at = clock.now()
        is_timed = self.clock.planned_epochs is None
        self.bar = Bar(
            desc=self.plan.phase.label,
            total=None if is_timed else self.steps,
            initial=position.total_steps,
            unit="step",
            mininterval=BAR_SECONDS,
            disable=not self.run.folder.leader,
        )
        self.clock.start(self.run.seconds, position.total_steps)
        self._schedule_epoch()
        self.logged_share = self.clock.share_after(position.epoch)
        self.run.interrupts.deferred = True
        try:
            with self._memory(), contextlib.closing(loader):
                while not self.clock.is_over(self.position.epoch):
                    epoch = self.position.epoch
                    self._epoch(epoch, loader)
                    self._end_epoch(epoch)
        finally:
            self.run.interrupts.deferred = False
            self.bar.close()
        self._save(self.position.epoch, 0)
        self.run.earlier_steps += self.position.total_steps

    # ------------------------------------------------------------------ the clock
    def _measured_progress(self) -> float:
        """Return the progress by the clock of the first process; 0 in the others."""
        if not self.run.folder.leader:
            return 0.0
        return self.clock.measure(self.run.seconds, self.position.total_steps)

    def _advance(self, progress: float) -> None:
        """Set the progress that the first process measured."""
        self.clock.advance(progress, self.position.total_steps)
        self._schedule_epoch()

    def _schedule_epoch(self) -> None:
        self.method.scheduled_epoch = self.clock.recipe_epochs(self.plan.phase.epochs)

    def _end_phase_if_last(self, epoch: int) -> bool:
        """Return whether an epoch that just ended is the last one, and end the phase if it is."""
        images = sum(evaluator.images for evaluator in self.plan.due(epoch))
        is_last = self.clock.is_last_epoch(epoch, self.run.seconds, images)
        is_last = bool(distributed.broadcast(is_last))
        if is_last:
            self.clock.end_phase(self.position.total_steps)
            self._schedule_epoch()
        return is_last

    def _log_end(self, step_seconds: float) -> float:
        """Log the number of steps and the expected end of training. Return the seconds until it."""
        position = self.position
        expected = self.clock.forecast(
            step_seconds, self.run.seconds, position.epoch, position.total_steps
        )
        log.info(f"{self.plan.phase.label}: {expected.text(step_seconds)}")
        return expected.seconds

    # ------------------------------------------------------------------ steps
    def _epoch(self, epoch: int, loader: Loader) -> None:
        position = self.position
        started_at = clock.now() - position.seconds
        while position.step < self.batches.steps_per_epoch:
            if position.step and self.clock.is_up():
                break
            images = self.batches.step_size(position.step)
            step_started_at = clock.now()
            loss = self._step(epoch, position.step, loader)
            position.step += 1
            position.total_steps += 1
            position.seconds = clock.now() - started_at
            # without the time of a checkpoint
            self._count_pace(clock.now() - step_started_at, images)
            is_due = clock.now() - self.saved_at >= 60 * self.train.save_minutes
            if self.bar.will_draw():
                # _save stops all processes together
                is_due = is_due or self.bad_step.is_known()
                self._show(loss)
            self.bar.update()
            should_stop, should_save, progress = distributed.largest(
                self.run.interrupts.requested, is_due, self._measured_progress()
            )
            self._advance(progress)
            if should_stop or should_save:
                self._save(epoch, position.step)
            if should_stop:
                raise Interrupted(
                    f"interrupted. The same command resumes from epoch {epoch + 1}, "
                    f"step {position.step}"
                )
        self._check_finite()  # waits for the device
        position.seconds = clock.now() - started_at

    def _show(self, loss: Tensor) -> None:
        """Show the loss, the learning rate and the time that remains beside the bar."""
        remaining = self.clock.remaining_text(self.run.seconds)
        text = f"loss {loss.item():.4g}, lr {self._lr():.2e}{remaining}"
        self.bar.set_postfix_str(text, refresh=False)

    def _count_pace(self, seconds: float, images: int) -> None:
        """Count the time of a step, and log the expected end after the first ones."""
        pace = self.pace
        pace.add(seconds, images)
        if pace.image_seconds is not None:
            self.clock.count_step(pace.image_seconds)
        step_seconds = pace.step_seconds()
        if step_seconds is None:
            return
        remaining = self._log_end(step_seconds)
        enough = COMPILE_FROM.get(self.accelerator.device.type, math.inf)
        is_open = self.train.compile is None  # type: ignore[operator]  # as above
        if is_open and remaining >= enough:
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled stays as it is
            self._compile()
            pace.restart()

    def _step(self, epoch: int, step: int, loader: Loader) -> Tensor:
        """Make one optimizer step of ``accumulate`` micro-batches; return the last one's loss."""
        number = self.position.total_steps
        lr_step, elapsed_steps = self.clock.schedule_steps(number)
        self.schedule.step_update(lr_step)  # type: ignore[arg-type]  # any number serves
        self.set_weight_decay(elapsed_steps)
        step_share = self.batches.step_size(step) / distributed.world()
        for micro in range(self.train.accumulate):
            batch = next(loader)
            values = self._values(batch, epoch, micro, loader)
            self.position.sums.add(values, batch["weight"] * step_share)
            self.bad_step.note(values["loss"], number)
        self.method.before_step(epoch)
        if self.train.clip_grad:
            self.accelerator.unscale_gradients()
            is_per_tensor = self.train.clip_grad_mode == "tensor"
            clip_gradients(self.method, self.train.clip_grad, is_per_tensor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.method.after_step(elapsed_steps)
        if self.ema is not None:
            self.ema.update(self.method.backbone, step=number + 1)
        return values["loss"].detach()

    def _values(self, batch: Batch, epoch: int, micro: int, loader: Loader) -> dict[str, Tensor]:
        """Return what :meth:`_backward` does. Without memory it gets the batch once more."""
        try:
            return self._backward(batch, epoch, micro)
        except torch.OutOfMemoryError as error:
            # there are gradients already, or others wait for them
            if micro or distributed.world() > 1:
                raise
            batch = loader.throw(error)
        self.optimizer.zero_grad()  # outside, so that the memory of the first try is free
        return self._backward(batch, epoch, micro)

    def _backward(self, batch: Batch, epoch: int, micro: int) -> dict[str, Tensor]:
        """Add the gradients of a micro-batch. Return its loss and values for the log."""
        phase = self.plan.phase.number
        step = self.position.total_steps
        key = derive(self.run.config.seed, "step", phase, step, micro, distributed.rank())
        is_last = micro == self.train.accumulate - 1
        batch = on_device(batch, self.accelerator.device)
        sync = contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model)
        with sync, seeded(key):
            values: dict[str, Tensor] = self.model(batch, key, epoch)
            self.accelerator.backward(values["loss"] * batch["weight"])
        return values

    # ------------------------------------------------------------------ the end of an epoch
    def _end_epoch(self, epoch: int) -> None:
        position = self.position
        is_last = self._end_phase_if_last(epoch)
        images = min(self.batches.count, position.step * self.batches.batch_size)
        means = {name: value / images for name, value in self.position.sums.totals().items()}
        record = {
            "epoch": epoch + 1,
            "stage": self.plan.phase.number,
            "step": self.run.earlier_steps + position.total_steps,
            "loss": means.pop("loss"),
            "lr": self._lr(),
            "seconds": round(position.seconds, 3),
            "images_per_s": round(images / max(1e-9, position.seconds), 2),
            **means,
            **self._evaluate(epoch, self.plan.evaluators if is_last else self.plan.due(epoch)),
        }
        self._keep_best(record)
        share_before = self.logged_share
        self.logged_share = self.clock.share_after(epoch + 1)
        line = epoch_line(record, self.clock.planned_epochs, share_before, self.logged_share)
        if line:
            log.info(f"{self.plan.phase.label} {line}")
        self.run.folder.add_metrics(record)
        self.position = Position(epoch + 1, total_steps=position.total_steps)
        (progress,) = distributed.largest(self._measured_progress())
        self._advance(progress)

    def _keep_best(self, record: dict[str, Any]) -> None:
        """Copy the weights if the epoch is the best so far. They are part of the state."""
        if self.plan.keep is None:
            return
        value = record.get(self.plan.keep)
        if value is not None and (self.best is None or value > self.best.value):
            self.best = Best.of(record["epoch"], value, self.exported)

    def _evaluate(self, epoch: int, evaluators: list[Evaluator]) -> dict[str, float | None]:
        """Return the values of the evaluators after an epoch."""
        values: dict[str, float | None] = {}
        started_at = clock.now()
        if distributed.world() > 1:  # the first process's statistics are exported
            distribute_bn(self.exported, distributed.world())
        try:
            for evaluator in evaluators:
                values.update(evaluator(self.exported))
        except Interrupted:
            self._save(epoch, self.position.step)
            raise
        if evaluators:
            images = sum(evaluator.images for evaluator in evaluators)
            self.clock.count_evaluation((clock.now() - started_at) / images)
        return values

    def _lr(self) -> float:
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group.get("lr_scale", 1.0))

    # ------------------------------------------------------------------ the state
    def _check_finite(self) -> None:
        """Raise RunError if any process had a loss that is not finite. All must call together."""
        step = self.bad_step.of_all_processes()
        if step is not None:
            raise self._divergence("the loss is", step)

    def _divergence(self, subject: str, step: int) -> RunError:
        lr = self._lr()
        if self.clock.planned_epochs is not None:
            lr = self.schedule._get_lr(step)[0]
        epoch = step // self.batches.steps_per_epoch
        note = self.run.folder.checkpoint_note
        moment = f"at step {step + 1} (epoch {epoch + 1}, lr {lr:.3g}){note}"
        return diverged(subject, moment, self.train, self.run.precision)

    def _save(self, epoch: int, step: int) -> None:
        """Write the checkpoint, a :class:`TrainingState`."""
        self._check_finite()
        is_ruined = not all(bool(torch.isfinite(p).all()) for p in self.method.parameters())
        if distributed.largest(is_ruined)[0]:  # by the step after a finite loss
            raise self._divergence("the weights are", self.position.total_steps - 1)
        self.saved_at = clock.now()
        sums = self.position.sums.totals()
        if self.run.folder.leader:
            self.run.folder.save_state(self._state(epoch, step, sums))

    def _state(self, epoch: int, step: int, sums: dict[str, float]) -> TrainingState:
        run = self.run
        assert run.precision is not None and run.channels_last is not None
        assert run.views is not None  # all are decided by start()
        scaler = self.accelerator.scaler
        return TrainingState(
            stage=self.plan.phase.number,
            epoch=epoch,
            step=step,
            steps=[run.earlier_steps, self.position.total_steps],
            epoch_seconds=self.position.seconds,
            seconds=run.seconds,
            timer=self.clock.saved(),
            sums=sums,
            precision=run.precision,
            channels_last=run.channels_last,
            views=run.views,
            method=self.method.state_dict(),
            optimizer=self.optimizer.state_dict(),
            ema=None if self.ema is None else self.ema.module.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            best=None if self.best is None else vars(self.best).copy(),
        )

    def _restore(self, state: TrainingState) -> None:
        self.method.load_state_dict(state.method)
        self.optimizer.load_state_dict(state.optimizer)
        if self.ema is not None:
            self.ema.module.load_state_dict(state.ema)
        scaler = self.accelerator.scaler
        if scaler is not None and state.scaler is not None:
            scaler.load_state_dict(state.scaler)
        if state.best is not None:
            self.best = Best(**state.best)
        self.run.earlier_steps, total_steps = state.steps
        # between epochs only the end of a phase is saved
        is_end_of_phase = state.step == 0 and total_steps > 0
        self.clock.load(state.timer, is_end_of_phase)
        self.position = Position(state.epoch, state.step, total_steps, state.epoch_seconds)
        share = float(self.run.folder.leader)  # the sums are added up over processes
        self.position.sums.load(state.sums, share, self.accelerator.device)

    def _resume(self) -> None:
        """Load the checkpoint of a resumed run, and remove metrics that were written after it.

        :meth:`fit` gives the position to :func:`training_batches`, which begins at that step.
        """
        folder = self.run.folder
        state = folder.state
        folder.state = None
        if state is None:
            return
        with folder.reading_state():
            self._restore(state)
        folder.take_back(self.plan.phase.number, state.epoch + 1)
        log.info(f"{self.plan.phase.label} resumes from epoch {state.epoch + 1}, step {state.step}")
