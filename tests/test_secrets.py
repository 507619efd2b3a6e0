"""No secret in anything we write: planted in the environment, in URLs, in the user's config, on the command line and in the
words of exceptions, then looked for in every file of the run, in every tracker and in all output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trackbridge

SECRETS = {
    "wandb key": "b0a7c1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6a7b8",
    "mlflow password": "hunter2-Xq81zPm",
    "url password": "s3cretInTheUrl99",
    "token": "tok_9f8e7d6c5b4a39281706",
    "slack": "T0AAAAAAA/B0BBBBBBB/XyZ1234567890abcdefGHIJ",
    "hub": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "openai": "sk-proj-AbCdEf0123456789GhIjKl",
    "config": "correct-horse-battery",
    "argument": "arg-Zx98Cv76Bn54",
    "exception": "exc-Qw12Er34Ty56",
}

SCRIPT = """
import sys
import torch, trackbridge

secrets = dict(pair.split("=", 1) for pair in open("secrets.txt").read().splitlines())
config = {
    "lr": 0.1, "api_key": secrets["config"],
    "nested": {"db_password": secrets["config"], "list": [f"token={secrets['token']}"]},
    "webhook_url": f"https://hooks.slack.com/services/{secrets['slack']}",
    "note": f"see https://hooks.slack.com/services/{secrets['slack']} and https://me:{secrets['url password']}@host.example/x",
    "hub": secrets["hub"], "openai": secrets["openai"],
}
trackers = ["tensorboard", "mlflow", {"kind": "wandb", "mode": sys.argv[1], "base_url": sys.argv[2]}]
with_run = trackbridge.init(backend=trackers, config=config, id=sys.argv[3], recorder={"upload_batches": True})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with_run.watch(model, optimizer)
torch.manual_seed(0)
try:
    for step in range(60):
        loss = (model(torch.randn(8, 4)) ** 2).mean() * (1e4 if step == 45 else 1.0)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        for anomaly in with_run.step(loss=loss):
            print(anomaly)
    raise RuntimeError(f"login failed: password={secrets['exception']} at https://me:{secrets['url password']}@host.example/")
except RuntimeError as error:
    print(with_run.finish(25, status="failed", error=str(error)))
print(with_run.urls)
"""


def train(folder: Path, mode: str, base_url: str, run: str, mlflow: str) -> str:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))},
        "WANDB_API_KEY": SECRETS["wandb key"],
        "MLFLOW_TRACKING_URI": mlflow,
        "MLFLOW_TRACKING_PASSWORD": SECRETS["mlflow password"],
        "MLFLOW_TRACKING_USERNAME": "me",
        "SLACK_WEBHOOK": f"https://hooks.slack.com/services/{SECRETS['slack']}",
        "HF_TOKEN": SECRETS["hub"],
        "MY_TOKEN": SECRETS["token"],
        "OPENAI_API_KEY": SECRETS["openai"],
        "HTTPS_PROXY_NOTE": f"http://me:{SECRETS['url password']}@proxy.example:3128",
    }
    planted = [f"--api-key={SECRETS['argument']}", f"--password {SECRETS['argument']}"]
    done = subprocess.run(
        [sys.executable, "train.py", mode, base_url, run, *planted],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "secrets.txt").write_text("\n".join(f"{name}={secret}" for name, secret in SECRETS.items()))
    return folder


def leaks(folder: Path, output: str) -> list[str]:
    """Which secrets are where. Compressed columns are read, too."""
    import pandas as pd

    found = [f"{name} in the output" for name, secret in SECRETS.items() if secret in output]
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if path.suffix == ".parquet":
            data += pd.read_parquet(path).to_csv().encode()
        found += [f"{name} in {path.relative_to(folder)}" for name, secret in SECRETS.items() if secret.encode() in data]
    return found


def _end_shipper(run: Path) -> None:
    """It would go on for half an hour, as its trackers are away."""
    for claim in (run / "shipper").glob("*.claim"):
        try:
            os.kill(int(json.loads(claim.read_text())["pid"]), signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            pass


@pytest.mark.timeout(400)
def test_with_trackers_that_are_away_and_words_that_tell_too_much(place: Path) -> None:
    """Both servers refuse: their SDKs' errors name URLs; credentials are in MLflow's URI and password variables."""
    uri = f"http://me:{SECRETS['url password']}@127.0.0.1:9"
    output = train(place, "online", "http://127.0.0.1:9", "away", uri)
    run = place / "runs" / "away"
    _end_shipper(run)
    assert "127.0.0.1:9" in (run / "shipper" / "mlflow.json").read_text(), "the error is told, without its secret"
    assert list((run / "capsules").glob("spike-*")), "there is no capsule to look into"
    assert leaks(run, output) == []
    record = trackbridge.load(run)
    assert record.config["lr"] == 0.1 and record.config["api_key"] == "[redacted]"
    assert record.error is not None and "[redacted]" in record.error


@pytest.mark.timeout(400)
def test_with_trackers_that_are_there(place: Path) -> None:
    """What is delivered: MLflow's database and artifacts, W&B's run files, event files, reports."""
    output = train(place, "offline", "http://127.0.0.1:9", "there", f"sqlite:///{place}/mlflow.db")
    run = place / "runs" / "there"
    status = {path.stem: json.loads(path.read_text()) for path in (run / "shipper").glob("*.json")}
    assert all(status[kind]["rows"] > 50 for kind in ("tensorboard", "wandb")), status
    assert leaks(run, output) == []
    held = [path for path in place.rglob("*") if path.name == "mlflow.db" or "mlruns" in path.parts]
    assert any(path.name == "mlflow.db" for path in held)
    for path in held:
        if path.is_file():
            data = path.read_bytes()
            assert [name for name, secret in SECRETS.items() if secret.encode() in data] == [], path
