"""Run the stage that a config belongs to."""

from typing import Any

from idmm.stages.resolve import resolve


def run_stage(config: Any, started_at: float | None = None) -> dict:
    """Run a stage; return the content of ``result.json``.

    Args:
        config: Of any stage.
        started_at: When the command began (``clock.now()``), which ``train.minutes`` and ``seconds`` count from.

    Raises:
        UserError: A mistake in the config or the data. Faults of names come first, before torch is imported.
        RunError: Training could not continue.
        Interrupted: Ctrl-C or SIGTERM.
    """
    setup = resolve(config, started_at)
    match setup.stage.NAME:
        case "pretrain":
            from idmm.stages.pretrain import pretrain as run
        case "finetune":
            from idmm.stages.finetune import finetune as run
        case "probe":
            from idmm.stages.probe import probe as run
        case "detect":
            from idmm.dense.detect import detect as run
        case "segment":
            from idmm.dense.segment import segment as run
    return run(setup)
