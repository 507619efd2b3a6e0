"""Secrets never reach what we write; ordinary training code is left alone."""

from __future__ import annotations

import pytest

from trackbridge import redact

SECRETS = [
    "https://user:hunter22@tracker.example/x",
    "postgresql://me:pw@db/mlflow",
    "--api-key abcdef123456",
    "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
    'password: "correct-horse"',
    "HF_TOKEN=hf_abcdefghij1234567890",
    "Authorization token: abc123def456ghi789",
    "https://hooks.slack.com/services/T000/B000/XXXX",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
]
HIDDEN = [
    "hunter22",
    "me:pw",
    "abcdef123456",
    "0123456789abcdef01234567",
    "correct-horse",
    "abcdefghij1234567890",
    "abc123def456ghi789",
    "XXXX",
    "ghp_0123",
]

INNOCENT = [
    "num_tokens: 5000000",
    "tokenizer: gpt2-large-x",
    "token = self.embed(x)",
    "tokens_per_s=123456.7",
    "https://example.org/path?x=1",
    "lr=0.0003, batch_size=512",
    "max_tokens=1000000",
]


@pytest.mark.parametrize(("text", "secret"), zip(SECRETS, HIDDEN, strict=True))
def test_secrets_go(text: str, secret: str) -> None:
    assert secret not in redact.text(text)
    assert redact.HIDDEN in redact.text(text)


@pytest.mark.parametrize("text", INNOCENT)
def test_training_code_stays(text: str) -> None:
    assert redact.text(text) == text


def test_redacting_twice_changes_nothing() -> None:
    for text in SECRETS:
        assert redact.text(redact.text(text)) == redact.text(text)


def test_everything_below_a_secret_name_goes_whatever_its_type() -> None:
    given = {
        "db": {"password": b"bytesecret12345"},
        "WANDB_API_KEY": ["listsecret123456"],
        "token": {"v": "nestedsecret1234"},
        "auth": "Bearer abcdefghijklmnop1234",
        "pin": {"password": 12345678},
        "pad_token": 50256,
    }
    words = repr(redact.tree(given))
    for secret in ("bytesecret", "listsecret", "nestedsecret", "abcdefghij", "12345678"):
        assert secret not in words
    assert redact.tree(given)["pad_token"] == 50256


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["a", "-", "ACGTTGCA", "0f", "token", "key=", "http", "x.y_z-", "=", " "])
def test_long_lines_take_linear_time(piece: str) -> None:
    """A megabyte each; with a quadratic pattern the first would take hours."""
    redact.text(piece * (1_000_000 // len(piece)))


def test_whole_values_under_secret_names() -> None:
    given = {"optim": {"lr": 3e-4}, "auth": {"api_key": "short", "token": "t"}, "n_tokens": 5, "urls": ["https://a:b@c/"]}
    kept = redact.tree(given)
    assert kept["optim"] == {"lr": 3e-4} and kept["n_tokens"] == 5
    assert kept["auth"] == {"api_key": redact.HIDDEN, "token": redact.HIDDEN}
    assert kept["urls"] == [f"https://{redact.HIDDEN}@c/"]
    assert given["auth"]["api_key"] == "short"
