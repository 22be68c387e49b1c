"""What the commands here share: their client of the Hub, and that whatever goes wrong becomes one line and status 1."""

import base64
import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# How long the Hub may stay silent. A commit is answered once all of it is stored, which takes seconds.
TIMEOUT_S = 30.0

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# An id of git, or a sha256. `huggingface_hub` takes it for the name of a file.
_ETAG = re.compile(r'(W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?')
_USERINFO = re.compile(r"(?<=://)[^/\s]*@")


@contextlib.contextmanager
def requirements() -> Iterator[None]:
    """Around imports of what may not be installed: ends the program with one line that says what is missing."""
    try:
        yield
    except ImportError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: error: {error}: pip install -r requirements.txt")


with requirements():
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        import httpx2 as httpx
    except ImportError:  # huggingface_hub before 2
        import httpx


class CommandError(Exception):
    """The command cannot do what was asked; the message says what was found and what was expected."""


_EXPECTED = (CommandError, OSError, ValueError, httpx.HTTPError, httpx.InvalidURL)


def is_repo_id(text: str) -> bool:
    """Whether it has the form ORG/NAME."""
    return _REPO_ID.fullmatch(text) is not None


def check_repo_id(text: str) -> None:
    """Raises CommandError unless the argument ORG/NAME has that form."""
    if not is_repo_id(text):
        raise CommandError(f"ORG/NAME: expected a repository such as lossless-kernels/lossless-kernels, found {text!r}")


def is_commit(text: object) -> bool:
    """Whether it is the full id of a commit, or of anything else in git."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def hub_client() -> "HfApi":
    """A client of the Hub at HF_ENDPOINT, for all of this process.

    `huggingface_hub` waits for ever, joins ETags to paths, and repeats a password of the address in its messages. With
    this client a silence of `TIMEOUT_S` is an error, and so is an ETag that is no id; only the Hub sees the password.
    """
    with requirements():
        from huggingface_hub import HfApi, constants, set_client_factory
        from huggingface_hub.utils._http import default_client_factory
    try:
        address = urlsplit(constants.ENDPOINT)
        userinfo, _, host = address.netloc.rpartition("@")
        endpoint = address._replace(netloc=host).geturl()
        authority = httpx.URL(endpoint).netloc
    except (ValueError, httpx.InvalidURL):
        host = ""
    if not host or address.scheme not in ("http", "https"):
        # What stands there may hold a password.
        raise CommandError("HF_ENDPOINT: expected an address such as https://huggingface.co")

    def prepare(request):
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            what: min(TIMEOUT_S, limits.get(what) or TIMEOUT_S) for what in ("connect", "read", "write", "pool")
        }
        if userinfo and request.url.netloc == authority:
            token = base64.b64encode(unquote(userinfo).encode()).decode()
            request.headers["Authorization"] = f"Basic {token}"

    def check(response):
        commit = response.headers.get("X-Repo-Commit")
        # From the storage behind the Hub an ETag is anything, and is not used.
        etag = commit and (response.headers.get("X-Linked-ETag") or response.headers.get("ETag"))
        if etag and not _ETAG.fullmatch(etag):
            raise CommandError(f"{response.url}: ETag: expected the id of a file's content, found {etag!r}")

    def make():
        client = default_client_factory()
        client.event_hooks = {
            "request": [*client.event_hooks["request"], prepare],
            "response": [*client.event_hooks["response"], check],
        }
        return client

    set_client_factory(make)
    return HfApi(endpoint=endpoint)


def exit_status(name: str, command: Callable[[], Optional[int]]) -> int:
    """Runs a command; errors that a user can meet are printed after its name, all others are left to Python."""
    try:
        return command() or 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
    except Exception as error:
        if not isinstance(error, _EXPECTED) and not _is_of_the_client(error):
            raise
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
    return 1


def _is_of_the_client(error: BaseException) -> bool:
    """Whether `huggingface_hub` raised it, or what that called: it takes the form of the Hub's answers for granted."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("huggingface_hub.") for frame in frames)


def one_line(error: BaseException) -> str:
    """The message of an error, without line breaks and passwords; with the address where the Hub was not understood."""
    return _USERINFO.sub("", _message(error))


def _message(error: BaseException) -> str:
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _message(error.__cause__)
    message = " ".join(str(error).split()) or type(error).__name__
    if _is_of_the_client(error) and (isinstance(error, JSONDecodeError) or not isinstance(error, _EXPECTED)):
        return f"the Hub's answer does not have the expected form: {type(error).__name__}: {message}"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        url = str(error.response.request.url)
        return message if url in message else f"{message} ({url})"
    if isinstance(error, httpx.RequestError):
        return f"the Hub at {error.request.url.host}:{error.request.url.port or 443} does not answer: {message}"
    if isinstance(error, OSError) and error.filename and str(error.filename) not in message:
        return f"{error.filename}: {message}"
    return message
