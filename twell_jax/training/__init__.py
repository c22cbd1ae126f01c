"""Training: configuration, the step, the loop, checkpoints and reports."""
