"""The one training loop, the run folder with its checkpoint, optimizer, schedules, precision and
the clock."""
