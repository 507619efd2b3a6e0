"""A fault zoo: small real trainings with an injected cause, recorded and diagnosed by the code that watches a live run.

    python -m benchmarks.faults --quick
    python -m benchmarks.faults --jobs 2 --json outcomes.json

Ground truth is the injection. Causes are in `causes`, models and data in `tasks`, healthy controls in `healthy`.
"""
