"""No secret leaves in an export, whatever text it stands in."""

from pathlib import Path

import pytest

from agent.redaction import REMOVED, redactor

CLEAN = redactor({"MY_API_KEY": "value-of-mine-123", "PATH": "/usr/bin"}, {Path("/srv/project"): "WORKSPACE"})
SECRETS = [
    "sk-proj-abcdefghij0123456789ABCDEFGHIJ",
    "sk-ant-api03-abcdefghij0123456789-ABCDEFGHIJ",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11AAAAAAA0abcdefghijklmnop_qrstuvwxyz",
    "hf_abcdefghijklmnopqrstuvwxyz012345",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
    "value-of-mine-123",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("text", ["{}", "# key: {}\n", 'client(api_key="{}")', "a={}&b=1", "({})", "said {}, then"])
def test_a_key_is_removed_wherever_it_stands(secret, text):
    said = CLEAN(text.format(secret))
    assert secret not in said
    assert REMOVED in said


@pytest.mark.parametrize(
    "text",
    [
        'password = "correct-horse"',
        "{'db_password': 'correct-horse'}",
        '{"client_secret": "correct-horse"}',
        "export MY_TOKEN=correct-horse",
        "AWS_SECRET_ACCESS_KEY=correct-horse",
        "https://user:correct-horse@example.org/x",
        "Authorization: Bearer correct-horse-battery",
        "-----BEGIN RSA PRIVATE KEY-----\ncorrect-horse\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\ncorrect-horse, cut off",
        '{\\"api_key\\": \\"correct-horse\\"}',
    ],
)
def test_what_is_named_as_a_secret_is_removed_whatever_it_looks_like(text):
    assert "correct-horse" not in CLEAN(text)


def test_the_users_own_folders_are_shortened():
    assert CLEAN("File /srv/project/model.py, line 3") == "File WORKSPACE/model.py, line 3"


@pytest.mark.parametrize(
    "text",
    [
        "tokens = x.shape[0]  # number of tokens",
        "def kernel_fn(x, weight):\n    return x * weight\n",
        "next_token = logits.argmax(-1)",
        "max_tokens: 16384",
        "secret inputs; a secret size in 3..17",
        "task-oriented risk-averse disk-based scheduling-of-things-here",
        "https://example.org/a:b",
    ],
)
def test_kernels_and_sentences_stay_as_they_are(text):
    assert CLEAN(text) == text
