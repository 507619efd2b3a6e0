"""Exactly once, under random faults: seeded schedules of what goes wrong in a run, for each real tracker.

``python -m tests.faults tensorboard mlflow wandb --schedules 200`` runs many and says which seeds failed; the suite runs twenty
per tracker (``tests/test_exactly_once_*.py``).
"""
