"""The tests; this file runs before any of them loads torch."""

import os

# Idle OpenMP threads sleep rather than spin: thousands of tiny calls would wait for them on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
