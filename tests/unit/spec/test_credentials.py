"""A job with a credential is refused, with the way to do it; ordinary jobs are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from yunlu.core.errors import JobError
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job
from yunlu.spec.scaffold import scaffold

CANARY = "c4n4ry7SingsInThe9Mine"
S3, HTTP = "AWS_SECRET_ACCESS_KEY", "FSSPEC_HTTP="


def job(**parts: Any) -> dict[str, Any]:
    return {"task": "tabular-classification", "model": "mlp", "data": "x.csv", **parts}


def options(url: str, **given: Any) -> dict[str, Any]:
    return job(data={"train": url, "options": given})


HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "password in the URL": (job(data=f"https://me:{CANARY}@h/x.csv"), "data", HTTP),
    "password with a slash": (job(data=f"s3://AKIA:{CANARY}/a+b@bucket/x.csv"), "data", S3),
    "token in the URL": (job(data=f"https://{CANARY}@h/x.csv"), "data", HTTP),
    "password without a user": (job(data=f"https://:{CANARY}@h/x.csv"), "data", HTTP),
    "chained URL": (job(data=f"simplecache::https://me:{CANARY}@h/x.csv"), "data", HTTP),
    "password for sftp": (job(data=f"sftp://me:{CANARY}@h/x"), "data", "FSSPEC_SFTP_PASSWORD"),
    "presigned by AWS": (job(data=f"https://b.s3.aws/x?X-Amz-Signature={CANARY}"), "data", HTTP),
    "presigned by Google": (job(data=f"https://g/x?X-Goog-Signature={CANARY}"), "data", HTTP),
    "shared access signature": (job(data=f"https://a/x?sv=1&sig={CANARY}"), "data", HTTP),
    "token in the query": (job(data=f"https://h/x.csv?token={CANARY}"), "data", HTTP),
    "key in the query": (job(data=f"https://h/x.csv?api_key={CANARY}"), "data", HTTP),
    "Google's key in the query": (job(data=f"https://h/x.csv?key={CANARY}"), "data", HTTP),
    "validation data": (
        job(data={"train": "x.csv", "validation": f"https://me:{CANARY}@h/x"}), "data.validation", HTTP,
    ),
    "test data": (job(data={"train": "x.csv", "test": f"s3://a:{CANARY}@b/x"}), "data.test", S3),
    "weights": (job(model={"name": "mlp", "weights": f"s3://a:{CANARY}@b/m"}), "model.weights", S3),
    "model name": (job(model=f"hf:https://me:{CANARY}@hub/m"), "model", "environment"),
    "tokenizer": (
        job(data={"train": "x", "tokenizer": f"https://{CANARY}@h/t"}), "data.tokenizer", HTTP,
    ),
    "checkpoint URL": (
        job(train={"checkpoint": {"url": f"s3://a:{CANARY}@b/r"}}), "train.checkpoint.url", S3,
    ),
    "checkpoint options": (
        job(train={"checkpoint": {"url": "s3://b/r", "options": {"secret": CANARY}}}),
        "train.checkpoint.options.secret", S3,
    ),
    "tracker": (job(trackers=[f"my:Tracker?token={CANARY}"]), "trackers[0]", "environment"),
    "searched option": (
        job(search={"space": {"data.options.secret": [CANARY, "b"]}}),
        "search.space.data.options.secret", "environment",
    ),
    "searched URL": (
        job(search={"space": {"data.train": [f"https://{CANARY}@h/x", "b"]}}), "search.space", HTTP,
    ),
    "password of the model": (
        job(model={"name": "a:B", "args": {"password": CANARY}}), "model.args.password", "environment",
    ),
    "GitHub token": (job(model={"name": "a:B", "args": {"x": f"ghp_{CANARY}"}}), "model.args.x", ""),
    "Hugging Face token": (options("x.csv", extra=f"hf_{CANARY}"), "data.options.extra", ""),
    "JSON web token": (
        options("x.csv", extra=f"eyJhbGciOiJIUzI1NiJ9.{CANARY}.{CANARY}"), "data.options.extra", "",
    ),
    "private key": (
        options("x.csv", extra=f"-----BEGIN PRIVATE KEY-----\n{CANARY}"), "data.options.extra", "",
    ),
    "header": (
        options("https://h/x", headers={"Authorization": f"Bearer {CANARY}"}),
        "data.options.headers.Authorization", HTTP,
    ),
    "unknown header": (
        options("https://h/x", headers={"X-Door": CANARY}), "data.options.headers.X-Door", HTTP,
    ),
    "header of the client": (
        options("https://h/x", client_kwargs={"headers": {"Cookie": CANARY}}),
        "data.options.client_kwargs.headers.Cookie", HTTP,
    ),
    "auth as a list": (options("https://h/x", auth=["me", CANARY]), "data.options.auth", HTTP),
    "auth of the client": (
        options("https://h/x", client_kwargs={"auth": ["me", CANARY]}),
        "data.options.client_kwargs.auth", HTTP,
    ),
    "number as a password": (options("ftp://h/x", password=12345678), "data.options.password", "FSSPEC_FTP"),
    "unknown option": (options("s3://b/x", door=CANARY), "data.options.door", "FSSPEC_S3_DOOR"),
    "endpoint with a password": (
        options("s3://b/x", endpoint_url=f"http://me:{CANARY}@h:9000"), "data.options.endpoint_url", HTTP,
    ),
    "proxy with a password": (
        options("https://h/x", proxy=f"http://me:{CANARY}@proxy:3128"), "data.options.proxy", HTTP,
    ),
    "nested by protocol": (
        options("simplecache::s3://b/x", s3={"secret": CANARY}), "data.options.s3.secret", S3,
    ),
    **{
        f"option {name}": (options("s3://b/x", **{name: CANARY}), f"data.options.{name}", S3)
        for name in ("key", "secret", "token", "pat", "auth", "password", "sas_token", "account_key",
                     "connection_string", "sasl_plain_username", "passphrase", "client_secret")
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_credential_is_refused_with_the_way_to_do_it(kind: str) -> None:
    mapping, key, way = HOSTILE[kind]
    with pytest.raises(InvalidJobError) as refused:
        job_from_mapping(mapping)
    text = str(refused.value)
    assert any(problem.key.startswith(key) and way in problem.message
               for problem in refused.value.problems), text  # fmt: skip
    assert CANARY not in text


ORDINARY: dict[str, dict[str, Any]] = {
    "a download": job(data="https://zenodo.org/records/1/files/x.csv?download=1"),
    "a query": job(data="https://h/x.csv?format=csv&gid=0&key=train"),
    "a path with @": job(data="https://host:8443/people/@me/x.csv"),
    "a port": job(data="http://[::1]:9000/x.csv"),
    "a revision": job(data="hf://datasets/owner/name@main/x.parquet"),
    "a container": job(data="abfs://container@account.dfs.core.windows.net/x.csv"),
    "a repository": job(data="github://owner:repository@main/x.csv"),
    "a user": job(data="sftp://me@host/x.csv"),
    "a column": job(data={"train": "x.csv", "input": ["key", "token"], "target": "token"}),
    "a list of keys": options("x.csv", keys=["a", "b"]),
    "a list of keys in a bucket": options("s3://b/x.csv", keys=["a", "b"]),
    "a tokenizer": job(task="language-modeling", data={"train": "x.txt", "tokenizer": "bpe"}),
    "special tokens": job(model={"name": "a:B", "args": {"pad_token": "<pad>", "key": "label"}}),
    "an endpoint": options("s3://b/x", client_kwargs={"endpoint_url": "https://s3.example.org"}),
    "a bucket of everybody": options("s3://b/x", anon=True, profile="me", requester_pays=True),
    "a signature's version": options("s3://b/x", config_kwargs={"signature_version": "s3v4"}),
    "a sign-in method": options("gs://b/x", token="google_default", project="p"),
    "headers": options("https://h/x", headers={"User-Agent": "me", "Accept": "text/csv"}),
    "netrc": options("https://h/x", client_kwargs={"trust_env": True}),
    "a key file": options("sftp://h/x", username="me", key_filename="~/.ssh/id"),
    "an unknown store": options("mine://h/x", shelf="third"),
    "no token": options("hf://datasets/a/b", token=False),
    "sizes": options("s3://b/x", default_block_size=1 << 20, max_concurrency=4),
    "a search": job(search={"space": {"train.optimizer.lr": [0.1, 0.01]}}),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_job_passes(kind: str) -> None:
    job_from_mapping(ORDINARY[kind])


def test_an_override_is_refused_and_says_that_commands_can_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("task: tabular-classification\nmodel: mlp\ndata: s3://b/x.csv\n")
    with pytest.raises(
        InvalidJobError, match=r"--set data\.options\.secret: a credential"
    ) as refused:
        load_job(file, overrides=[f"data.options.secret={CANARY}"])
    assert "others can also see the arguments of a command" in str(refused.value)
    assert S3 in str(refused.value)
    assert CANARY not in str(refused.value)


def test_the_line_of_a_credential_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "task: tabular-classification\nmodel: mlp\ndata:\n  train: s3://b/x.csv\n"
        f"  options:\n    secret: {CANARY}\n"
    )
    with pytest.raises(InvalidJobError, match=r"line 6.*data\.options\.secret: a credential"):
        load_job(file)


def test_the_value_of_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "plainword")
    with pytest.raises(InvalidJobError, match="has the value of MY_TOKEN"):
        job_from_mapping(options("mine://h/x", shelf="plainword"))


def test_a_first_job_file_is_not_written_with_a_credential() -> None:
    with pytest.raises(JobError, match="a password in a URL"):
        scaffold("tabular-classification", f"https://me:{CANARY}@h/x.csv")
