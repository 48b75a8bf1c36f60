"""Differential privacy: what a run may take from private data, what it costs, and the proof of what it took.

Training for 40 epochs on 60,000 records in batches of 2,048 with a noise multiplier of 1.95 costs epsilon 2.99 at
delta = 1.7e-6.

Nothing is imported here, and none of the modules about cost needs torch: `mechanisms` (what was taken), `accounting`
(what it costs), `schedules`, `calibration` and `planning` (how much noise, before a run), `budget` (the gate in front
of every step) and `ledger` (what was taken, on disk). The accountant comes with the extra `train`.
"""
