"""``python -m trackbridge.cli``: the command line where the script is not on the path."""

from trackbridge.cli import app

app(prog_name="trackbridge")
