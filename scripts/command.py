"""Shared by the commands: the client of the Hub, and errors as one line with exit status 1."""

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

# The Hub answers a commit after storing all of it, which takes seconds.
TIMEOUT_S = 30.0

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A git id or a sha256. `huggingface_hub` uses it as a file name.
_ETAG = re.compile(r'(W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?')
_USERINFO = re.compile(r"(?<=://)[^/\s]*@")


@contextlib.contextmanager
def requirements() -> Iterator[None]:
    """For imports of optional packages: a missing one ends the program with a one-line error."""
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
    """The command cannot do what was asked; the message says what was expected and what was found."""


_EXPECTED = (CommandError, OSError, ValueError, httpx.HTTPError, httpx.InvalidURL)


def is_repo_id(text: str) -> bool:
    """Whether `text` has the form ORG/NAME."""
    return _REPO_ID.fullmatch(text) is not None


def check_repo_id(text: str) -> None:
    """Raises CommandError unless `text`, the argument ORG/NAME, has that form."""
    if not is_repo_id(text):
        raise CommandError(f"ORG/NAME: expected a repository such as lossless-kernels/lossless-kernels, found {text!r}")


def is_commit(text: object) -> bool:
    """Whether `text` is a full git id."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def hub_client() -> "HfApi":
    """A client of the Hub at HF_ENDPOINT. It changes the HTTP client of `huggingface_hub` in this process.

    `huggingface_hub` alone has no timeout, uses ETags as file names, and prints a password that the address contains.
    Here a Hub that sends nothing for `TIMEOUT_S` is an error, an ETag must be an id, and the password is sent to the Hub alone.

    Raises:
        CommandError: HF_ENDPOINT is not an address.
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
        # The value is not shown: it may hold a password.
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
        # Answers of the storage behind the Hub have no X-Repo-Commit; their ETags are not used.
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
    """Runs a command and returns its exit status.

    Expected errors are printed as one line that begins with `name`; other exceptions are programming errors and are raised.
    """
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
    """Whether the error comes from a call of `huggingface_hub`, which does not check the form of the Hub's answers."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("huggingface_hub.") for frame in frames)


def one_line(error: BaseException) -> str:
    """The message of an error in one line, without passwords; with the address if the Hub answered with an error."""
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
