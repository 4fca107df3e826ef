"""The training loop, on accelerate. It knows no method and no dataset: a method returns a loss for
a batch."""

import contextlib
import math
import time

import torch
from timm.utils import ModelEmaV3, distribute_bn

from idmm import distributed
from idmm.data.device_views import DeviceViews
from idmm.data.loaders import AHEAD, BatchPlan, choose_workers, on_device, training_batches
from idmm.errors import Interrupted, RunError
from idmm.evaluation.evaluators import Evaluator
from idmm.methods.base import Method
from idmm.progress import Bar, duration, log
from idmm.seeding import derive, seeded
from idmm.training import clock
from idmm.training.clock import Timer
from idmm.training.device import enough_memory
from idmm.training.log import epoch_line
from idmm.training.optim import clip_gradients, create_optimizer
from idmm.training.plan import Pace, PhasePlan, Position, TrainingState
from idmm.training.run_context import RunContext
from idmm.training.schedule import learning_rate_of, weight_decay_schedule

BAR_SECONDS = 0.5  # between two updates of the bar, each of which waits for the device
COMPILE_FROM = {"cuda": 300.0}  # expected seconds, by device, from which compilation pays
# measured steps, or time, after which the log has the expected end
PACE_STEPS = 5
PACE_SECONDS = 3.0


class Loop:
    """Trains a method through one phase, from its first step or from the run's checkpoint."""

    def __init__(self, run: RunContext, method: Method, plan: PhasePlan):
        self.run = run
        self.method = method
        self.plan = plan
        self.train = run.train
        self.batches: BatchPlan = plan.batches
        self.steps = plan.phase.epochs * self.batches.steps_per_epoch  # of the schedules
        images = next(plan.batches.requests()).images
        with self._memory():
            run.start(method, plan.transform, images)
        self.accelerator = run.accelerator
        with self._memory():
            self._build()
            self.batch_fn = run.place_views(plan.transform)
            if self.train.compile:
                self._compile()
            self.position = Position()
            self.bad_step = torch.full((), -1, device=self.accelerator.device)
            # epoch (from 1), value and weights of the best epoch so far
            self.best: dict | None = None
            self.timer: Timer | None = None  # of ``train.minutes``, from the first step on
            # whether the last epoch that ended was the phase's last, and was evaluated
            self.was_last = False
            self._resume()
        self.pace = Pace()
        self.end_logged = False
        self.workers = choose_workers(run.workers, self.batch_fn, images)
        # steps after the first one whose batches are ready by then, and their time
        self.ready_steps = AHEAD * self.workers // self.train.accumulate
        self.ready_seconds = 0.0

    def _memory(self) -> contextlib.AbstractContextManager:
        otherwise = RunError(
            f"out of memory with a batch of {self.batches.batch_size} images: try --train.accumulate "
            f"{2 * self.train.accumulate} (the same step in smaller passes), a smaller --train.batch_size or "
            "--train.precision bf16, in a new --out"
        )
        return enough_memory(otherwise)

    def _build(self) -> None:
        plan = self.plan
        method = self.method.to(self.accelerator.device)
        method.train()
        scales = method.lr_scales
        others = {
            n: (child, scales.get(n, 1.0))
            for n, child in method.named_children()
            if n != "backbone"
        }
        optimizer = create_optimizer(method.backbone, others, self.train, plan.phase.lr)
        self.schedule = learning_rate_of(
            self.train, optimizer, self.batches.steps_per_epoch, self.steps
        )
        self.set_weight_decay = weight_decay_schedule(
            optimizer, self.steps, self.train.weight_decay_end
        )
        if self.train.ema:
            self.ema = ModelEmaV3(method.backbone, self.train.ema, use_warmup=True)
        else:
            self.ema = None
        self.model, self.optimizer = self.accelerator.prepare(method, optimizer)

    def _compile(self) -> None:
        self.method.compile()
        if isinstance(self.batch_fn, DeviceViews):
            self.batch_fn.compile()

    @property
    def exported(self) -> torch.nn.Module:
        """The backbone to evaluate and export: the EMA's, else the one that the method exports."""
        if self.ema is None:
            return self.method.exported
        return self.ema.module

    def fit(self) -> None:
        """Train the phase to its end.

        Raises:
            Interrupted: Ctrl-C or another stop signal. The state is saved.
            RunError: The loss is not finite, or memory or disk ran out. The last checkpoint is
                kept.
        """
        position = self.position
        plan = self.plan
        with self._memory():
            loader = training_batches(
                self.batch_fn, self.batches, self.workers, position.epoch, position.step
            )
        has_state = self.run.earlier_steps or position.total_steps
        # the first step saves a new run's state
        if has_state:
            self.saved_at = clock.now()
        else:
            self.saved_at = -math.inf
        self.bar = Bar(
            desc=plan.phase.label,
            total=self.steps if self.train.minutes is None else None,
            initial=position.total_steps,
            unit="step",
            mininterval=BAR_SECONDS,
            disable=not self.run.folder.leader,
        )
        self._start_timer()
        self.logged_share = self._share(position.epoch)
        self.run.interrupts.deferred = True
        try:
            with self._memory(), contextlib.closing(loader):
                while not self._is_over():
                    epoch = self.position.epoch
                    self._epoch(epoch, loader)
                    self._end_epoch(epoch)
        finally:
            self.run.interrupts.deferred = False
            self.bar.close()
        self._save(self.position.epoch, 0)
        self.run.earlier_steps += self.position.total_steps

    # ------------------------------------------------------------------ by the clock
    def _start_timer(self) -> None:
        """Start the phase's share of ``train.minutes``, or continue with the saved timer."""
        if self.train.minutes is None:
            return
        self.timer = self.timer or self.plan.timer(self.run.seconds, self.train)
        self._advance(self.timer.progress)

    def _advance(self, progress: float) -> None:
        """Set the progress of ``train.minutes``, which the first process measured."""
        if self.timer is not None:
            self.timer.advance(progress, self.position.total_steps)
            self.method.scheduled_epoch = self.timer.progress * self.plan.phase.epochs

    def _measure_progress(self) -> float:
        """Return the progress by the clock of the first process; 0 in the others and without
        ``train.minutes``."""
        if self.timer is None or not self.run.folder.leader:
            return 0.0
        return self.timer.measure(self.run.seconds, self.position.total_steps)

    def _is_over(self) -> bool:
        """Return whether the phase is over. If time ran out after an epoch, one more step is made
        and evaluated."""
        if self.timer is None:
            return self.position.epoch == self.batches.epochs
        return self.was_last

    def _is_last(self, epoch: int) -> bool:
        """Return whether an epoch that just ended is the last: no time remains for its evaluation
        and another step."""
        if self.timer is None:
            return epoch + 1 == self.batches.epochs
        images = sum(evaluator.images for evaluator in self._due(epoch))
        seconds = (
            self.timer.eval_seconds(images) + self.timer.image_seconds * self.batches.batch_size
        )
        is_last = self.timer.progress >= 1 or self.timer.remaining(self.run.seconds) < seconds
        if is_last := distributed.broadcast(is_last):
            self._advance(1.0)
        return is_last

    def _log_end(self, step_seconds: float) -> float:
        """Log the number of steps and the expected end of training. Return the seconds until
        then."""
        if self.timer is None:
            steps = f"{self.steps} steps"
            epochs = self.batches.epochs
            eval_images = sum(
                evaluator.images
                * (-(-epochs // evaluator.every) - self.position.epoch // evaluator.every)
                for evaluator in self.plan.evaluators
            )
            image_seconds = step_seconds * self.batches.steps_per_epoch / self.batches.count
            remaining_steps = self.steps - self.position.total_steps
            seconds = remaining_steps * step_seconds + clock.FORWARD * image_seconds * eval_images
        else:
            # by max_epochs
            most = self.batches.epochs * self.batches.steps_per_epoch - self.position.total_steps
            seconds = max(0.0, min(self.timer.remaining(self.run.seconds), most * step_seconds))
            count = self.position.total_steps + seconds / step_seconds
            steps = f"about {count:.0f} steps by train.minutes {self.train.minutes:g}"
        end = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        line = "%s: %s of about %.2g s each. Training ends at about %s, in %s"
        log.info(line, self.plan.phase.label, steps, step_seconds, end, duration(seconds))
        return seconds

    # ------------------------------------------------------------------ steps
    def _epoch(self, epoch: int, loader) -> None:
        position = self.position
        started_at = clock.now() - self.position.seconds
        while position.step < self.batches.steps_per_epoch:
            if self.timer is not None and self.timer.progress >= 1 and position.step:
                break
            images = self.batches.step_size(position.step)
            step_started_at = clock.now()
            loss = self._step(epoch, position.step, loader)
            position.step = position.step + 1
            position.total_steps = position.total_steps + 1
            position.seconds = clock.now() - started_at
            # without the time of a checkpoint
            self._count_pace(clock.now() - step_started_at, images)
            should_save = clock.now() - self.saved_at >= 60 * self.train.save_minutes
            if self.bar.will_draw():
                # _save stops all processes together
                should_save = should_save or int(self.bad_step) >= 0
                self._show(loss)
            self.bar.update()
            should_stop, should_save, progress = distributed.largest(
                self.run.interrupts.requested, should_save, self._measure_progress()
            )
            self._advance(progress)
            if should_stop or should_save:
                self._save(epoch, position.step)
            if should_stop:
                raise Interrupted(
                    f"interrupted. The same command resumes from epoch {epoch + 1}, step {position.step}"
                )
        self._check_finite()  # waits for the device
        position.seconds = clock.now() - started_at

    def _show(self, loss: torch.Tensor) -> None:
        """Show the loss, the learning rate and the time that remains beside the bar."""
        text = f"loss {loss.item():.4g}, lr {self._lr():.2e}"
        if self.timer is not None:
            text += f", {duration(self.timer.remaining(self.run.seconds))} to go"
        self.bar.set_postfix_str(text, refresh=False)

    def _count_pace(self, seconds: float, images: int) -> None:
        """Count the time of a step, and log the expected end after the first ones."""
        pace = self.pace
        pace.add(seconds, images)
        if not pace.steps:
            return
        if self.timer is not None:
            self.timer.image_seconds = pace.seconds / pace.images
        if self.end_logged:
            return
        if pace.steps == self.ready_steps:
            self.ready_seconds = pace.seconds
        steps = pace.steps - self.ready_steps
        taken = pace.seconds - self.ready_seconds
        if steps < max(PACE_STEPS, self.workers):  # workers that started together finish together
            steps = pace.steps
            taken = pace.seconds
            if taken < PACE_SECONDS:
                return
        self.end_logged = True
        seconds = self._log_end(taken / steps)
        if self.train.compile is None and seconds >= COMPILE_FROM.get(
            self.accelerator.device.type, math.inf
        ):
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled stays as it is
            self._compile()
            self.pace = Pace()

    def _step(self, epoch: int, step: int, loader) -> torch.Tensor:
        """Make one optimizer step of ``accumulate`` micro-batches; return the last one's loss."""
        number = self.position.total_steps
        # in the schedules
        lr_step = number
        elapsed_steps = number
        if self.timer is not None:
            lr_step = self.steps * self.timer.schedule_progress(number)
            elapsed_steps = self.steps * self.timer.progress
        self.schedule.step_update(lr_step)
        self.set_weight_decay(elapsed_steps)
        for micro in range(self.train.accumulate):
            batch = next(loader)
            try:
                out = self._backward(batch, epoch, micro)
            except torch.OutOfMemoryError as error:
                # there are gradients already, or others wait for them
                if micro or distributed.world() > 1:
                    raise
                batch = loader.throw(error)
                out = None
            if out is None:  # outside, so that the memory of the first try is free
                self.optimizer.zero_grad()
                out = self._backward(batch, epoch, micro)
            self._add_to_sums(
                out, batch["weight"] * self.batches.step_size(step) / distributed.world(), number
            )
        self.method.before_step(epoch)
        if self.train.clip_grad:
            self.accelerator.unscale_gradients()
            clip_gradients(self.method, self.train.clip_grad, self.train.clip_grad_mode == "tensor")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.method.after_step(elapsed_steps)
        if self.ema is not None:
            self.ema.update(self.method.backbone, step=number + 1)
        return out["loss"].detach()

    def _backward(self, batch: dict, epoch: int, micro: int) -> dict:
        """Add the gradients of a micro-batch. Return its loss and values for the log."""
        number = (self.plan.phase.number, self.position.total_steps)
        key = derive(self.run.seed, "step", *number, micro, distributed.rank())
        is_last = micro == self.train.accumulate - 1
        batch = on_device(batch, self.accelerator.device)
        with (
            contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model),
            seeded(key),
        ):
            out = self.model(batch, key, epoch)
            self.accelerator.backward(out["loss"] * batch["weight"])
        return out

    def _add_to_sums(self, out: dict, images: float, number: int) -> None:
        """Add to the epoch's sums and save the number of the first bad step, without waiting for
        the device."""
        sums = self.position.sums
        for name, value in out.items():
            value = value.detach().float() * images
            sums[name] = sums.get(name, 0) + value
        is_bad = ~torch.isfinite(out["loss"].detach())
        self.bad_step = torch.where(is_bad & (self.bad_step < 0), number, self.bad_step)

    # ------------------------------------------------------------------ the end of an epoch
    def _end_epoch(self, epoch: int) -> None:
        position = self.position
        is_last = self._is_last(epoch)
        self.was_last = is_last
        images = min(self.batches.count, position.step * self.batches.batch_size)
        values = {name: value / images for name, value in self._total_sums().items()}
        record = {
            "epoch": epoch + 1,
            "stage": self.plan.phase.number,
            "step": self.run.earlier_steps + position.total_steps,
            "loss": values.pop("loss"),
            "lr": self._lr(),
            "seconds": round(position.seconds, 3),
            "images_per_s": round(images / max(1e-9, position.seconds), 2),
            **values,
            **self._evaluate(epoch, self.plan.evaluators if is_last else self._due(epoch)),
        }
        self._keep_best(record)
        before = self.logged_share
        self.logged_share = self._share(epoch + 1)
        if line := epoch_line(
            record, None if self.timer else self.batches.epochs, before, self.logged_share
        ):
            log.info("%s %s", self.plan.phase.label, line)
        self.run.folder.add_metrics(record)
        self.position = Position(epoch + 1, total_steps=position.total_steps)
        if self.timer is not None:
            self._advance(distributed.largest(self._measure_progress())[0])

    def _share(self, epochs: int) -> float:
        """Return the share of the phase that is over after that many epochs."""
        if self.timer is None:
            return epochs / self.batches.epochs
        return self.timer.progress

    def _keep_best(self, record: dict) -> None:
        """Copy the weights if the epoch is the best so far. They are part of the state."""
        value = record.get(self.plan.keep)
        if value is not None and (self.best is None or value > self.best["value"]):
            weights = {
                name: tensor.to("cpu", copy=True)
                for name, tensor in self.exported.state_dict().items()
            }
            self.best = {"epoch": record["epoch"], "value": value, "weights": weights}

    def _due(self, epoch: int) -> list[Evaluator]:
        """Return the evaluators that an epoch calls if it is not the last."""
        return [
            evaluator for evaluator in self.plan.evaluators if (epoch + 1) % evaluator.every == 0
        ]

    def _evaluate(self, epoch: int, evaluators: list[Evaluator]) -> dict[str, float]:
        """Return the values of the evaluators after an epoch."""
        values = {}
        started_at = clock.now()
        if distributed.world() > 1:  # the first process's statistics are exported
            distribute_bn(self.exported, distributed.world())
        try:
            for evaluator in evaluators:
                values.update(evaluator(self.exported))
        except Interrupted:
            self._save(epoch, self.position.step)
            raise
        if self.timer is not None and evaluators:
            images = sum(evaluator.images for evaluator in evaluators)
            self.timer.eval_image_seconds = (clock.now() - started_at) / images
        return values

    def _total_sums(self) -> dict[str, float]:
        """Return the epoch's sums so far over all processes."""
        names = sorted(self.position.sums)
        if not names:
            return {}
        sums = torch.stack([self.position.sums[name] for name in names])
        if distributed.world() > 1:
            torch.distributed.all_reduce(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def _lr(self) -> float:
        group = self.optimizer.param_groups[0]
        return group["lr"] / group.get("lr_scale", 1.0)

    # ------------------------------------------------------------------ the state
    def _check_finite(self) -> None:
        """Raise RunError if any process had a loss that is not finite. All must call together."""
        bad_steps = [step for step in distributed.gather(int(self.bad_step)) if step >= 0]
        if bad_steps:
            raise self._divergence("the loss is not finite", min(bad_steps))

    def _divergence(self, what: str, step: int) -> RunError:
        epoch = step // self.batches.steps_per_epoch
        if self.timer is None:
            lr = self.schedule._get_lr(step)[0]
        else:
            lr = self._lr()
        remedies = ["lower --train.lr"]
        if not self.train.clip_grad:
            remedies.append("set --train.clip_grad 1")
        if self.run.precision != "fp32":
            remedies.append("set --train.precision fp32")
        where = (
            f"at step {step + 1} (epoch {epoch + 1}, lr {lr:.3g}){self.run.folder.checkpoint_note}"
        )
        return RunError(f"{what} {where}: {' or '.join(remedies)}, in a new --out", shared=True)

    def _save(self, epoch: int, step: int) -> None:
        """Write the checkpoint, a :class:`TrainingState`."""
        self._check_finite()
        ruined = not all(bool(torch.isfinite(p).all()) for p in self.method.parameters())
        if distributed.largest(ruined)[0]:  # by the step after a finite loss
            raise self._divergence("the weights are not finite", self.position.total_steps - 1)
        self.saved_at = clock.now()
        sums = self._total_sums()
        if not self.run.folder.leader:
            return
        self.run.folder.save_state(
            TrainingState(
                stage=self.plan.phase.number,
                epoch=epoch,
                step=step,
                steps=[self.run.earlier_steps, self.position.total_steps],
                epoch_seconds=self.position.seconds,
                seconds=self.run.seconds,
                timer=None if self.timer is None else vars(self.timer).copy(),
                sums=sums,
                precision=self.run.precision,
                channels_last=self.run.channels_last,
                views=self.run.views,
                method=self.method.state_dict(),
                optimizer=self.optimizer.state_dict(),
                ema=None if self.ema is None else self.ema.module.state_dict(),
                scaler=None
                if self.accelerator.scaler is None
                else self.accelerator.scaler.state_dict(),
                best=self.best,
            )
        )

    def _load(self, state: TrainingState) -> None:
        self.method.load_state_dict(state.method)
        self.optimizer.load_state_dict(state.optimizer)
        if self.ema is not None:
            self.ema.module.load_state_dict(state.ema)
        if self.accelerator.scaler is not None and state.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.best = state.best
        self.timer = state.timer and Timer(**state.timer)
        self.run.earlier_steps, total_steps = state.steps
        share = float(self.run.folder.leader)  # the sums are added up over processes
        sums = {
            n: torch.tensor(v * share, device=self.accelerator.device)
            for n, v in state.sums.items()
        }
        self.position = Position(state.epoch, state.step, total_steps, state.epoch_seconds, sums)

    def _resume(self) -> None:
        """Load the checkpoint of a resumed run, and remove the metrics that were written after
        it."""
        state = self.run.folder.state
        self.run.folder.state = None
        if state is None:
            return
        with self.run.folder.reading_state():
            self._load(state)
        # between epochs only the end of a phase is saved
        self.was_last = state.step == 0 and state.steps[1] > 0
        self.run.folder.take_back(self.plan.phase.number, state.epoch + 1)
        log.info(
            "%s resumes from epoch %d, step %d", self.plan.phase.label, state.epoch + 1, state.step
        )
