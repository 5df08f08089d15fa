"""Secrets are masked, in every form in which they reach a text; ordinary text stays as it is."""

from __future__ import annotations

import base64

import pytest

from yunlu.core.secrets import (
    find_secret,
    find_variable,
    is_secret_name,
    is_secret_option,
    mask,
    mask_job_text,
    mask_value,
)

CANARY = "c4n4ry7SingsInThe9Mine"
BASIC = base64.b64encode(f"me:{CANARY}".encode()).decode()
PEM = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}\n-----END OPENSSH PRIVATE KEY-----"
JWT = f"eyJhbGciOiJIUzI1NiJ9.{CANARY}.{CANARY}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # URLs
        (f"https://user:{CANARY}@host/x", "https://***@host/x"),
        (f"cannot open s3://AKIA:{CANARY}/with/slashes+@bucket/x", "cannot open s3://***@bucket/x"),
        (f"https://{CANARY}@host/x", "https://***@host/x"),
        (f"https://:{CANARY}@host/x", "https://***@host/x"),
        (f"sftp://me:{CANARY}@host/x", "sftp://***@host/x"),
        (f"zip://a.csv::https://me:{CANARY}@host/x", "zip://a.csv::https://***@host/x"),
        (f"postgresql+psycopg://me:{CANARY}@db:5432/x", "postgresql+psycopg://***@db:5432/x"),
        (f"postgresql://me:a@{CANARY}@db/x@y", "postgresql://***@db/x@y"),
        (f"https://h/x?X-Amz-Signature={CANARY}&part=1", "https://h/x?X-Amz-Signature=***&part=1"),
        (f"https://h/x?a=1&X-Goog-Credential={CANARY}", "https://h/x?a=1&X-Goog-Credential=***"),
        (f"https://h/x?AWSAccessKeyId={CANARY}", "https://h/x?AWSAccessKeyId=***"),
        (f"https://h/x?sv=2024&sig={CANARY}", "https://h/x?sv=2024&sig=***"),
        (f"https://h/x?token={CANARY}#part", "https://h/x?token=***#part"),
        (f"https://h/x?api_key={CANARY}", "https://h/x?api_key=***"),
        (f"https://h/x?key={CANARY}", "https://h/x?key=***"),
        (f"https://h/x?private_link={CANARY}", "https://h/x?private_link=***"),
        # headers
        (f"Authorization: Bearer {CANARY}", "Authorization: Bearer ***"),
        (f"authorization: token {CANARY}", "authorization: token ***"),
        (f"sent 'Bearer {CANARY}'", "sent 'Bearer ***'"),
        (f"sent Basic {BASIC}", "sent Basic ***"),
        (f"Proxy-Authorization: Basic {BASIC}", "Proxy-Authorization: Basic ***"),
        (f"X-Api-Key: {CANARY}", "X-Api-Key: ***"),
        (f"PRIVATE-TOKEN: {CANARY}", "PRIVATE-TOKEN: ***"),
        (f"Cookie: session={CANARY}", "Cookie: ***"),
        (f"{{'Authorization': '{CANARY}'}}", "{'Authorization': '***'}"),
        # names and values
        (f"--set data.options.secret={CANARY}", "--set data.options.secret=***"),
        (f"MLFLOW_TRACKING_PASSWORD={CANARY}", "MLFLOW_TRACKING_PASSWORD=***"),
        (f'{{"aws_secret_access_key": "{CANARY}"}}', '{"aws_secret_access_key": "***"}'),
        (f"{{'sasl_plain_password': '{CANARY}'}}", "{'sasl_plain_password': '***'}"),
        (f"login(password='{CANARY}')", "login(password='***')"),
        (f"AccountName=x;AccountKey={CANARY};", "AccountName=x;AccountKey=***;"),
        (f"access_token={CANARY} was refused", "access_token=*** was refused"),
        (f"token={CANARY}", "token=***"),
        (f"password: {CANARY}", "password: ***"),
        (f"the password is {CANARY}, it seems", "the password is ***, it seems"),
        (f"machine h login me password {CANARY}", "machine h login me password ***"),
        (f"curl --token {CANARY} https://h", "curl --token *** https://h"),
        (f"['curl', '--api-key', '{CANARY}', 'h']", "['curl', '--api-key', '***', 'h']"),
        (f'"{{\\"password\\": \\"{CANARY}\\"}}"', '"{\\"password\\": \\"***\\"}"'),
        # shapes
        ("key AKIAIOSFODNN7EXAMPLE", "key ***"),
        (f"hf_{CANARY}", "***"),
        (f"ghp_{CANARY}", "***"),
        (f"github_pat_11A_{CANARY}", "***"),
        (f"glpat-{CANARY}", "***"),
        (f"sk-proj-{CANARY}", "***"),
        (f"sk_live_{CANARY}", "***"),
        ("AIza" + "Sy4" * 11 + "ab", "***"),
        (f"xoxb-{CANARY}", "***"),
        ("dapi" + "0a" * 16, "***"),
        (JWT, "***"),
        (PEM, "***"),
        ("wandb: API key is " + "0a" * 20, "wandb: API key is ***"),
    ],
)
def test_secrets_are_masked_in_every_form(text: str, shown: str) -> None:
    assert mask(text) == shown
    assert mask(shown) == shown  # again, on the way to a report
    assert CANARY not in mask_value({"a": [text]})["a"][0]


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b.csv",
        "https://host:8443/people/@me/data.csv",
        "http://[::1]:9000/@x",
        "https://zenodo.org/records/1/files/x.csv?download=1&version=2",
        "https://h/x.csv?key=label&token=",
        "hf://datasets/owner/name@main/train.parquet",
        "abfs://container@account.dfs.core.windows.net/x.csv",
        "github://owner:repository@main/x.csv",
        "sftp://me@host/x.csv",
        "mail me@home.example",
        "data.tokenizer=bpe, pad_token=<pad>, token=bpe",
        "unknown key: tokens; the token: expected a name",
        "keys=['a', 'b'] column='token' tokens=300",
        "Basic training of the bearer of bad news",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "task-a1a1a1a1a1a1a1a1a1a1a1a1a1 of sk-learn-like-names-without-digits",
        "hf_transformers_are_models, monkey=1, secretary=2",
        "data.options.secret: a credential, and a job is stored and shown",
        "password=None token=null secret=''",
        "unknown token: block2_layer1; the password is expected; secret: none of 200000",
        "yunlu join h:1 --token-file token2026.txt --token-stdin",
        "https://h/x:y@z/a@b",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert mask(text) == text
    assert find_secret(text) is None


def test_values_of_secret_variables_are_masked_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {
        "WANDB_API_KEY": "plainwordone",
        "AWS_SECRET_ACCESS_KEY": "ab/cd+ef/gh=ij",
        "MY_PAT": "plainwordtwo",
        "DB_PASSWORD": 'quote"d-three',
        "DATABASE_URL": "postgresql://me:plainwordfour@db/x",
        "FSSPEC_HTTP": '{"headers": {"Authorization": "Bearer plainwordfive"}}',
        "FSSPEC_SFTP_PASSWORD": "plainwordsix",
        "SERVICE_SECRET": "line-one-of-the-value\nline-two-of-the-value",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for leak in (
        "plainwordone", "ab/cd+ef/gh=ij", "ab%2Fcd%2Bef%2Fgh%3Dij", "plainwordtwo", "quote\"d-three",
        'quote\\"d-three', "plainwordfour", "plainwordfive", "plainwordsix", "line-two-of-the-value",
    ):  # fmt: skip
        assert mask(f"it said: <{leak}>") == "it said: <***>"


def test_variables_that_hold_no_secret_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = {
        "SORT_KEY": "size",
        "SSH_KEY": "/etc/hostname",
        "TOKENIZERS_PARALLELISM": "falsehood",
        "HF_HOME": "/data/huggingface",
        "PWD": "/work/training-data",
    }
    for name, value in ordinary.items():
        monkeypatch.setenv(name, value)
        assert mask(f"read {value} now") == f"read {value} now"


def test_a_job_with_the_value_of_a_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "training")
    monkeypatch.setenv("OTHER_TOKEN", CANARY)
    assert find_variable("training") == "MY_TOKEN"
    assert find_variable("data/training/x.csv") is None
    assert find_variable(f"data/{CANARY}.csv") == "OTHER_TOKEN"


def test_data_is_masked_by_name_and_keeps_its_shape() -> None:
    data = {
        "options": {
            "key": "a",
            "auth": ["me", "pw"],
            "anon": False,
            "block_size": 5,
            "keys": ["a"],
        },
        "headers": {"Authorization": "x", "Accept": "text/csv"},
        "password": "b",
        "token": "cls",
        "count": 3,
    }
    assert mask_value(data) == {
        "options": {"key": "***", "auth": "***", "anon": False, "block_size": 5, "keys": ["a"]},
        "headers": {"Authorization": "***", "Accept": "text/csv"},
        "password": "***",
        "token": "cls",
        "count": 3,
    }


def test_the_copy_of_a_job_file_is_masked_line_by_line() -> None:
    text = f"data:\n  train: x.csv\n  options:\n    secret: {CANARY}\n# password: {CANARY}\ntarget: token\n"
    assert mask_job_text(text) == text.replace(CANARY, "***")


@pytest.mark.parametrize("name", ["password", "awsSecretAccessKey", "X-Api-Key", "client_secret"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_option(name)


@pytest.mark.parametrize("name", ["key", "token", "auth", "pat", "sasl_username", "sas"])
def test_names_of_secrets_among_options_alone(name: str) -> None:
    assert not is_secret_name(name)
    assert is_secret_option(name)


@pytest.mark.parametrize(
    "name", ["keys", "tokens", "tokenizer", "monkey", "author", "path", "key_filename", "secretary"]
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_option(name)
