"""trackbridge in the training loops that people already have: one module per framework, imported when first named.

Reached as ``trackbridge.hf``, ``trackbridge.lightning`` and ``trackbridge.accelerate``. Each tells a `Run` what a plain loop
would: `fetched` before a batch is used, `micro` after each micro-batch, `step` after the optimizer, `pause` around what is no
training.
"""
