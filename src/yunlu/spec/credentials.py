"""Credentials in a job are refused: a job is stored, shown and sent around.

They come from the environment of whoever runs it. Checked are URLs, tokens of known shapes, the names of
options and headers, and values of this process's own secret variables.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from yunlu.core.errors import JobError
from yunlu.core.secrets import find_secret, find_variable, is_secret_name, is_secret_option
from yunlu.spec.schema import ValidationFinding
from yunlu.spec.source import InvalidJobError, Problem, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yunlu.spec.source import KeyPath

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)

_STORES: Mapping[str, str] = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the path of a key file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "HF_TOKEN, or `hf auth login`",
    "http": """FSSPEC_HTTP='{"headers": {…}}'""",
    "sftp": "FSSPEC_SFTP_PASSWORD, or a key of your ssh agent",
    "ftp": "FSSPEC_FTP_USERNAME and FSSPEC_FTP_PASSWORD",
    "github": "FSSPEC_GITHUB_USERNAME and FSSPEC_GITHUB_TOKEN",
    "smb": "FSSPEC_SMB_PASSWORD",
    "webdav": "FSSPEC_WEBDAV_AUTH",
}
"""Which variable each store reads; fsspec reads ``FSSPEC_STORE_OPTION`` for any option of any store."""
_ALIASES = {
    "s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "wasb": "az", "wasbs": "az",
    "https": "http", "ssh": "sftp", "ftps": "ftp", "webdav+https": "webdav",
}  # fmt: skip

_OPTIONS = {
    # of every file system
    "protocol", "target_protocol", "target_options", "fo", "mode", "compression", "encoding",
    "errors", "newline", "cache_type", "default_cache_type", "cache_options", "cache_storage",
    "cache_check", "check_files", "asynchronous", "use_listings_cache", "skip_instance_cache",
    "host", "hostname", "port", "path", "root", "username", "user", "proxy", "proxies", "timeout",
    "client_kwargs", "config_kwargs", "session_kwargs", "trust_env", "base_url", "verify",
    # s3
    "anon", "endpoint", "endpoint_url", "region", "region_name", "profile", "s3",
    "s3_additional_kwargs", "addressing_style", "signature_version", "api_version", "acl",
    "serversideencryption", "ssekmskeyid", "storageclass", "retries", "checksum_algorithm",
    "request_checksum_calculation", "response_checksum_validation", "user_agent",
    # gs, az, hf, http, sftp, github, hdfs
    "project", "access", "consistency", "location", "default_location", "account_name",
    "account_host", "tenant_id", "client_id", "location_mode", "version", "revision", "repo_type",
    "size_policy", "headers", "key_filename", "known_hosts", "org", "repo", "sha", "kerb_ticket",
    "extra_conf",
}  # fmt: skip
"""Options that may hold a text, of stores that ask for credentials; other names are not guessed at."""
_HEADERS = {
    "accept", "accept-encoding", "accept-language", "user-agent", "range", "referer", "origin",
    "cache-control", "content-type", "if-modified-since", "if-none-match", "connection",
    "x-request-id", "x-amz-request-payer", "x-goog-user-project",
}  # fmt: skip
_SIGN_IN_METHODS = {"anon", "google_default", "cache", "cloud", "browser"}
"""``token`` of gs: a method, not a token."""


def find_credentials(data: Any) -> Iterator[ValidationFinding]:
    """Every credential in the plain data of a job."""
    yield from _search(data, (), stores=(), is_option=False)


def refuse_credentials(data: Any, where: str) -> None:
    """Raise where there is one."""
    problems = [
        Problem(key=show_path(finding.path), message=finding.message)
        for finding in find_credentials(data)
    ]
    if problems:
        raise InvalidJobError(where, problems)


def refuse_credential_in(text: str, what: str) -> None:
    """Raise where a text for a job, such as the URL of its data, shows a credential."""
    if (kind := find_secret(text)) is not None:
        raise JobError(f"{what} shows {kind}.", hint=_advise(_stores_in(text), is_option=False))


def _search(
    data: Any, path: KeyPath, *, stores: tuple[str, ...], is_option: bool
) -> Iterator[ValidationFinding]:
    if isinstance(data, dict):
        section = cast("dict[Any, Any]", data)
        named = tuple(store for item in section.values() for store in _stores_in(item))
        own = named if named and not is_option else stores  # an endpoint is no store
        for name, item in section.items():
            yield from _search_item(str(name), item, path, stores=own, is_option=is_option)
    elif isinstance(data, (list, tuple)):
        for position, item in enumerate(cast("list[Any]", data)):
            yield from _search(item, (*path, position), stores=stores, is_option=is_option)
    elif isinstance(data, str):
        if (kind := find_secret(data)) is not None:
            yield ValidationFinding(
                path, _refusal(f"shows {kind}", _stores_in(data), is_option=False)
            )
        elif (variable := find_variable(data)) is not None:
            message = (
                f"has the value of {variable}, which would be stored with the job; remove it here"
            )
            yield ValidationFinding(path, f"{message} and let it be read from the environment")


def _search_item(
    name: str, item: Any, path: KeyPath, *, stores: tuple[str, ...], is_option: bool
) -> Iterator[ValidationFinding]:
    here = (*path, name)
    *_, last = name.split(".")  # search.space names fields by their dotted path
    is_option = is_option or "options" in name.split(".")[:-1]
    if path and str(path[-1]).lower() == "headers" and is_option:
        fault = _header_fault(name, item, stores)
    elif is_option:
        fault = _option_fault(last, item, stores)
    else:
        is_text = isinstance(item, (str, list)) and bool(item)
        fault = _refusal("a credential", (), is_option=False)
        fault = fault if is_text and is_secret_name(last) else None
    if fault is not None:
        yield ValidationFinding(here, fault)
        return
    yield from _search(item, here, stores=stores, is_option=is_option or last == "options")


def _option_fault(name: str, value: Any, stores: tuple[str, ...]) -> str | None:
    if isinstance(value, (bool, dict)) or value in (None, "", []) or name.lower() in _OPTIONS:
        return None
    if name == "token" and isinstance(value, str) and value in _SIGN_IN_METHODS:
        return None
    if is_secret_option(name):
        return _refusal("a credential", stores)
    if store := next((store for store in stores if store in _STORES), None):
        variable = f"FSSPEC_{store}_{name}".upper()
        fault = "a job may not set this option, whose text may be a credential"
        return (
            f"{fault}. Instead, set in the environment: {variable}"
            if isinstance(value, str)
            else None
        )
    return None


def _header_fault(name: str, value: Any, stores: tuple[str, ...]) -> str | None:
    if name.lower() in _HEADERS or value in (None, ""):
        return None
    return _refusal("a header that may hold a credential", stores)


def _refusal(fault: str, stores: tuple[str, ...], *, is_option: bool = True) -> str:
    return (
        f"{fault}, and a job is stored and shown. Instead, {_advise(stores, is_option=is_option)}"
    )


def _advise(stores: tuple[str, ...], *, is_option: bool = True) -> str:
    for store in stores:
        if store in _STORES:
            return f"set in the environment: {_STORES[store]}"
    if not is_option:
        return "read it from the environment"
    return "set it in the environment: FSSPEC_<STORE>_<OPTION> for an option of a store"


def _stores_in(text: Any) -> tuple[str, ...]:
    """Stores that a URL names, also those of a chain (``simplecache::s3://…``)."""
    if not isinstance(text, str):
        return ()
    prefix = ("hf",) if text.startswith("hf:") else ()
    schemes = [str(scheme).lower() for scheme in _SCHEME.findall(text)]
    return (*prefix, *(_ALIASES.get(scheme) or scheme for scheme in schemes))
