"""Secrets in text: how they are recognised, and the only function that masks them; harmless foreign text.

Everything that Yunlu writes for others to read passes through ``mask`` or ``mask_value``: events, errors,
logs, reports, trackers, copies of job files. What is masked: user info and signed queries of URLs,
``name=value`` pairs and headers with a secret's name, tokens of a known shape, private keys, and the
values of this process's own secret environment variables.

Text that others wrote can carry anything. A terminal obeys control characters (title, clipboard, colours,
cursor); and bidirectional overrides show a text in another order than it is read. One function cleans it for
terminals, one for JSON that may be shown there, one for pages.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast
from urllib.parse import quote, quote_plus

from yunlu.core.limits import decode_json
from yunlu.core.settings import environment_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MASK = "***"
_SHORTEST_VALUE = 8
"""Shorter values of variables are words like ``none``, not secrets."""


def mask(text: str) -> str:
    """The text with every secret that can be recognised in it replaced by ``***``."""
    return _mask(text, _variable_values())


def mask_value(value: Any, *, in_options: bool = False) -> Any:
    """Plain data with its texts masked, and whatever stands under the name of a secret.

    Inside ``options`` and ``headers`` names such as ``key`` and ``auth`` are those of secrets, too.
    """
    return _mask_value(value, _variable_values(), in_options=in_options)


def mask_job_text(text: str) -> str:
    """The text of a job file; ``password: x`` on a line of its own is masked as in YAML."""
    return mask(_YAML_LINE.sub(_mask_yaml_line, text))


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a value of this name is a secret wherever it stands: ``password``, ``aws_secret_access_key``."""
    name_parts = _words(name)
    joined = "_".join(name_parts)
    return not _SECRET_WORDS.isdisjoint(name_parts) or any(part in joined for part in _SECRET_PARTS)


@lru_cache(maxsize=4096)
def is_secret_option(name: str) -> bool:
    """Whether an option of a file system, a tracker or a request holds a secret under this name.

    Names such as ``key``, ``token`` and ``auth`` mean something else in other places.
    """
    name_parts = _words(name)
    return (
        is_secret_name(name)
        or bool(name_parts and name_parts[-1] in _OPTION_WORDS)
        or "sasl" in name_parts
    )


def find_secret(text: str) -> str | None:
    """What kind of secret the text shows, such as ``a password in a URL``; None where there is none."""
    for pattern in _PATTERNS:
        if pattern.kind and any(
            pattern.replace(match) != match[0] for match in pattern.expression.finditer(text)
        ):
            return pattern.kind
    return None


def find_variable(text: str) -> str | None:
    """The secret environment variable whose value is this text, or stands in it if it is long."""
    for name, value in _secret_variables(environment_variables().items()):
        if text == value or (len(value) >= _LONG_VALUE and value in text):
            return name
    return None


_LONG_VALUE = 16
"""Shorter values may be part of an ordinary path by accident."""

# Names.

_SECRET_WORDS = {
    "password", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "credential",
    "credentials", "authorization", "bearer", "apikey", "accesskey", "secretkey", "privatekey",
    "signature", "cookie", "jwt", "pkey",
}  # fmt: skip
_SECRET_PARTS = (
    "api_key", "access_key", "secret_key", "private_key", "account_key", "shared_key",
    "signing_key", "encryption_key", "master_key", "auth_key", "customer_key", "access_token",
    "auth_token", "refresh_token", "session_token", "security_token", "id_token", "bearer_token",
    "sas_token", "api_token", "private_token", "hf_token", "connection_string", "conn_str", "private_link",
)  # fmt: skip
_OPTION_WORDS = {"key", "token", "auth", "pat", "sas", "sig", "login"}
_VARIABLE_WORDS = {"token", "key", "pat", "sas", "auth"}


def _words(name: str) -> list[str]:
    """``awsSecretKey``, ``aws-secret-key`` and ``AWS_SECRET_KEY`` → aws, secret, key."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word for word in re.split(r"[^a-z0-9]+", parted.lower()) if word]


def _mask(text: str, values: Sequence[str]) -> str:
    for value in values:
        if value in text:
            text = text.replace(value, MASK)
    for pattern in _PATTERNS:
        text = pattern.expression.sub(pattern.replace, text)
    return text


def _mask_value(value: Any, values: Sequence[str], *, in_options: bool) -> Any:
    if isinstance(value, str):
        return _mask(value, values)
    if isinstance(value, Mapping):
        return {
            (_mask(key, values) if isinstance(key, str) else key): _mask_item(
                str(key), item, values, in_options=in_options
            )
            for key, item in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return [_mask_value(item, values, in_options=in_options) for item in items]
    return value


def _mask_item(name: str, item: Any, values: Sequence[str], *, in_options: bool) -> Any:
    is_secret = is_secret_option(name) if in_options else is_secret_name(name)
    kinds = (str, list, tuple, int, float) if in_options else (str,)
    if is_secret and isinstance(item, kinds) and not isinstance(item, bool) and item:
        return MASK
    in_options = in_options or name.lower() in {"options", "headers"}
    return _mask_value(item, values, in_options=in_options)


# Environment variables.


def _variable_values() -> tuple[str, ...]:
    """Longest first: one value can contain another."""
    return _forms_of(tuple(environment_variables().items()))


@lru_cache(maxsize=4)
def _forms_of(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    forms: set[str] = set()
    for _, value in _secret_variables(variables):
        forms |= {value, quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1]}
        forms |= {line for line in value.splitlines() if len(line) >= _LONG_VALUE}
    return tuple(sorted(forms, key=len, reverse=True))


def _secret_variables(variables: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, text in variables:
        if name.startswith("FSSPEC_"):
            values = _values_of_json(name, text)
        elif _names_secret(name):
            values = [text]
        elif "://" in text:
            values = [match["password"] for match in _URL_PASSWORD.finditer(text)]
        else:
            continue
        for value in values:
            if len(value) >= _SHORTEST_VALUE and not _is_path(value):
                yield name, value


def _is_path(value: str) -> bool:
    """``SSH_KEY=/home/me/.ssh/id``: where a secret is, not the secret."""
    if not value.startswith(("/", "~", "./", "../")) or "\n" in value:
        return False
    try:
        return Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


@lru_cache(maxsize=4096)
def _names_secret(name: str) -> bool:
    name_parts = _words(name)
    if name in {"PWD", "OLDPWD"} or not name_parts:
        return False
    return is_secret_name(name) or name_parts[-1] in _VARIABLE_WORDS


def _values_of_json(name: str, text: str) -> list[str]:
    """``FSSPEC_S3='{"secret": "…"}'`` and ``FSSPEC_S3_SECRET=…``: options of a file system."""
    try:
        options = decode_json(text)
    except ValueError:
        options = text
    if not isinstance(options, dict):
        return [text] if is_secret_option(name) else []
    return list(_secret_leaves(cast("dict[str, Any]", options)))


def _secret_leaves(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_leaves(cast("Mapping[str, Any]", value))
        elif isinstance(value, str) and is_secret_option(name):
            yield value
            yield from value.split()[1:]  # ``Bearer x``


_URL_PASSWORD = re.compile(r"(?<!git)(?<!github)(?<!gitlab)://[^\s/@:]*:(?P<password>[^\s@/]+)@")

# Text.


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A form of secret; the groups ``before`` and ``after`` stay."""

    expression: re.Pattern[str]
    kind: str | None = None
    """What it is, for jobs that are refused because of it; None where the form alone proves nothing."""

    def replace(self, match: re.Match[str]) -> str:
        groups = match.groupdict()
        if not _is_meant(match):
            return match[0]
        return f"{groups.get('before') or ''}{MASK}{groups.get('after') or ''}"


def _is_meant(match: re.Match[str]) -> bool:
    """What an expression cannot say: schemes in which ``a@b`` is no user, names that are no secret's."""
    groups = match.groupdict()
    value = groups.get("value")
    if value is None:
        return True
    if value.strip("'\"") in {MASK, "", "None", "null", "true", "false"}:
        return False
    return all(
        is_meant(groups[group], value)
        for group, is_meant in _CONDITIONS.items()
        if groups.get(group) is not None
    )


def _is_user(scheme: str, value: str) -> bool:
    return scheme.lower() not in (_REFERENCE_SCHEMES if ":" in value else _USER_SCHEMES)


def _is_secret_query(name: str, value: str) -> bool:
    last = _words(name)[-1:]
    if last in (["key"], ["code"]) and not is_secret_name(name):
        return len(value) >= _LONG_VALUE
    return is_secret_option(name) or last == ["hmac"]


def _is_secret_pair(name: str, value: str) -> bool:
    """Rather a token than a word: ``token=bpe`` stays."""
    is_token = _words(name)[-1:] == ["token"]
    is_random = len(value) >= _SHORTEST_VALUE and any(sign.isdigit() for sign in value)
    return is_secret_name(name) or (is_token and is_random)


def _is_secret_argument(name: str) -> bool:
    """Before a colon or a space there are sentences, too: ``token 5`` stays, ``--token`` is an option."""
    return is_secret_name(name) or (name.startswith("--") and _words(name)[-1:] == ["token"])


def _is_basic(_: str, value: str) -> bool:
    """``Basic dXNlcjpwdw==`` is user:password; ``Basic training`` is not."""
    try:
        return b":" in base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (ValueError, binascii.Error):
        return False


_CONDITIONS: Mapping[str, Callable[[str, str], bool]] = {
    "scheme": _is_user,
    "query": _is_secret_query,
    "pair": _is_secret_pair,
    "named": lambda name, _: _is_secret_argument(name),
    "header": lambda name, _: is_secret_option(name),
    "basic": _is_basic,
}
"""By the group that an expression has."""
_USER_SCHEMES = {
    "ssh", "sftp", "git+ssh", "ftp", "smb", "hdfs", "webhdfs", "abfs", "abfss", "wasb", "wasbs",
    "adl", "az", "github", "git", "gitlab", "lakefs",
}  # fmt: skip
"""``sftp://me@host`` names a user, ``abfs://container@account`` a container: no secret alone."""
_REFERENCE_SCHEMES = {"github", "git", "gitlab"}
"""``github://owner:repository@branch/file``."""


def _compile(expression: str, kind: str | None = None, *, flags: int = 0) -> _Pattern:
    return _Pattern(re.compile(expression, flags | re.VERBOSE), kind)


_TOKENS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a GitLab token": r"\bglpat-[\w-]{20,}",
    "an API key": r"\bsk-(?=[\w-]{0,200}\d)[\w-]{20,}|\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "a Google key": r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}",
    "a Slack token": r"\bxox[abeoprs]-[\w-]{10,}",
    "a package registry's token": r"\bnpm_[A-Za-z0-9]{36}|\bpypi-[\w-]{32,}|\bdckr_pat_[\w-]{20,}",
    "a Databricks token": r"\bdapi[0-9a-f]{32}",
    "a Weights & Biases key": (
        r"\bwandb_v1_\w{20,}|(?P<before>wandb[^\n]{0,40}?)\b(?P<value>[0-9a-f]{40})\b"
    ),
    "a JSON web token": r"\beyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]*",
}

# From the widest form to the narrowest: what one has masked, the next leaves alone. Repeats that can start
# at every sign of a long word are bounded: the text may be a stranger's.
_PATTERNS: tuple[_Pattern, ...] = (
    _compile(
        r"-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)",
        "a private key",
        flags=re.DOTALL,
    ),
    _compile(  # user:password@, where what follows the colon is no port
        r"""(?P<before>\b(?P<scheme>[a-z][a-z0-9+.-]{0,30})://)
            (?P<value>[^\s/@:'"<>\[]{0,200}:(?!:|\d{1,5}(?:[/?\#]|$))[^\s@'"<>]{1,500}
            (?:@[^\s/@'"<>]{1,200}(?=@))*)(?P<after>@)""",
        "a password in a URL",
        flags=re.IGNORECASE,
    ),
    _compile(
        r"""(?P<before>\b(?P<scheme>[a-z][a-z0-9+.-]{0,30})://)(?P<value>[^\s/@:'"<>?\#]{1,500})(?P<after>@)""",
        "a user or token in a URL",
        flags=re.IGNORECASE,
    ),
    _compile(
        r"""(?P<before>[?&;](?P<query>[\w.-]+)=)(?P<value>[^&;\s'"<>\#]+)""",
        "a signature or token in the query of a URL",
    ),
    _compile(
        r"""(?P<before>\b(?:proxy-)?authorization["']?\s*[:=]\s*["']?
            (?:(?:bearer|basic|token|digest|negotiate|apikey|aws4-hmac-sha256)\s+)?+)
            (?P<value>[\w.~+/=-]{4,})""",
        "an Authorization header",
        flags=re.IGNORECASE,
    ),
    _compile(
        r"(?P<before>\bbearer\s+)(?P<value>(?=[\w.~+/=-]*\d)[\w.~+/=-]{12,})",
        "a bearer token",
        flags=re.IGNORECASE,
    ),
    _compile(
        r"(?P<before>\b(?P<basic>basic)\s+)(?P<value>[A-Za-z0-9+/]{6,}={0,2})",
        "a user and password (Basic)",
        flags=re.IGNORECASE,
    ),
    _compile(  # X-Api-Key: v
        r"(?P<before>\b(?P<header>(?:x-[\w-]{1,60}|private-token|(?:set-)?cookie)):\s*)(?P<value>[^\s,'\"]+)",
        flags=re.IGNORECASE,
    ),
    *(_compile(expression, kind) for kind, expression in _TOKENS.items()),
    _compile(  # 'secret': 'x', as in JSON and the repr of a mapping
        r"""(?P<before>(?P<quote>\\{0,3}["'])(?P<pair>[\w.-]+)(?P=quote)\s*:\s*b?\\{0,3}["'])
            (?P<value>[^"'\n]+?)(?P<after>\\{0,3}["'])"""
    ),
    _compile(  # secret=x, AccountKey=x;
        r"""(?P<before>(?<![\w.-])(?P<pair>[\w.-]+)\s?=\s?["']?)(?P<value>[^\s&;,"']+)"""
    ),
    _compile(  # password: x1, --api-key x1, ['--password', 'x1'], login me password x1
        r"""(?P<before>(?<![\w.-])(?P<named>-{0,2}[a-z][\w.-]*)
            (?::\s+|\s+(?:is\s+)?|["'],\s+)["']?)(?P<value>(?!-)(?=[^\s,;"'\d]{0,200}\d)[^\s,;"']{8,})""",
        flags=re.IGNORECASE,
    ),
)

_YAML_LINE = re.compile(
    r"^(?P<before>[ \t#-]*['\"]?(?P<name>[\w.-]+)['\"]?:[ \t]+)(?P<value>[^\s{\[|>&*].*)$",
    re.MULTILINE,
)


def _mask_yaml_line(match: re.Match[str]) -> str:
    return f"{match['before']}{MASK}" if is_secret_name(match["name"]) else match[0]


def make_process_private() -> None:
    """First call of every program that Yunlu starts.

    The umask covers files that libraries and the user's own code create. Text that Python code prints
    is masked line by line; what a library writes to the descriptor itself, or another program that the
    user's code starts, is not: it goes to the log as it is.
    """
    os.umask(0o077)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, cast("TextIO", MaskedStream(stream)))


class MaskedStream:
    """A text stream whose secrets are masked; everything else is that of the stream below."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._lines = threading.local()
        """What each thread has written, but not ended: a secret may come in several parts. Without a
        lock, which a forked child could find held for ever."""

    def write(self, text: str) -> int:
        """Write whole lines; the rest waits for its end."""
        before: str = getattr(self._lines, "rest", "")
        lines, end = before + text, max(text.rfind("\n"), text.rfind("\r"))
        if end < 0:
            self._lines.rest = lines
            if len(lines) > _LONGEST_LINE:
                self.flush()
            return len(text)
        cut = len(before) + end + 1
        self._lines.rest = lines[cut:]
        self._below.write(mask(lines[:cut]))
        self._below.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what has no end yet, too."""
        rest: str = getattr(self._lines, "rest", "")
        self._lines.rest = ""
        if rest:
            self._below.write(mask(rest))
        self._below.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


_LONGEST_LINE = 1 << 16


MARK = "·"
"""Stands for a character that was taken out."""

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0 without tab and newline: ESC, BEL, BS, CR
    "\x7f-\x9f"  # DEL and C1: CSI and OSC as one character
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, overrides, isolates
    "\u2028\u2029"  # line ends that only some programs know
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags: text that nobody sees
    "\ud800-\udfff"  # lone surrogates: no encoding has them
    "]"
)


def clean_for_terminal(text: str) -> str:
    """Replace every character that would steer the terminal or reorder the text by a mark."""
    return _CONTROLS.sub(MARK, text.replace("\r\n", "\n"))


def clean_for_page(text: str) -> str:
    """Replace the same characters: pages may not hold them either; HTML is escaped by the templates."""
    return clean_for_terminal(text)


def escape_for_json(text: str) -> str:
    """JSON text with the same characters written as escapes: the same values, safe to print."""
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(
        f"\\u{int.from_bytes(units[at : at + 2], 'big'):04x}" for at in range(0, len(units), 2)
    )
